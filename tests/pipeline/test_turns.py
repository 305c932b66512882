"""Replies named by the next turn's prompt: by hand, and through the engine."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.scenario import resolve, run_scenario
from pipeline.turns import SUCCESSORS_LOOKED_AT, name_replies
from schemas.study import Scenario
from tests.traces_made import made_trace


def turn(arrival_s, input_tokens, output_tokens, blocks, session="s", **more):
    return {
        "arrival_s": arrival_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "prefix_blocks": blocks,
        "session_id": session,
        **more,
    }


def named(trace, block_tokens):
    """(ids, named tokens) of each request, or None."""
    names = name_replies(trace, block_tokens)
    if names is None:
        return None
    bounds = names.block_offsets
    ids = [names.block_ids[bounds[i] : bounds[i + 1]].tolist() for i in range(len(bounds) - 1)]
    return list(zip(ids, names.named_tokens.tolist(), strict=True))


def test_the_next_turn_names_the_reply(tmp_path):
    """Blocks of 4. Turn 1 is 6 tokens and 5 of reply: its 11 tokens are the first of turn 2's 14: blocks 1, 3 and a part of 4."""
    trace = made_trace(tmp_path, [turn(0, 6, 5, [1, 2]), turn(1, 14, 3, [1, 3, 4, 5])], block_tokens=4)
    assert named(trace, 4) == [([1, 3, 4], 11), ([1, 3, 4, 5], 14)]
    names = name_replies(trace, 2)
    # At blocks of 2 turn 1 fills 5 blocks, 10 tokens; from token 4 on turn 2's hits rest on inference.
    assert (names.inferred_from[1], names.inferred_to[1], names.turns) == (4, 10, 1)
    assert names.inferred_tokens(np.array([0, 12], np.int32)).tolist() == [0, 6]
    assert names.inferred_tokens(np.array([0, 8], np.int32)).tolist() == [0, 4]
    assert names.inferred_tokens(np.array([0, 4], np.int32)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "second",
    [
        turn(1, 14, 3, [7, 8, 9, 10]),  # the history was rewritten
        turn(1, 10, 3, [1, 3, 4]),  # shorter than prompt and reply
        turn(1, 14, 3, [1, 3, 4, 5], session="t"),  # somebody else
        turn(1, 14, 3, [1, 3, 4, 5], session=None),
        turn(1, 14, 3, [1, 3, 4, 5], identity=1),  # another model, adapter or trust domain
        turn(1, 14, 3, None),  # what it begins with is not known
    ],
)
def test_nothing_is_inferred_where_the_trace_speaks_against_it(tmp_path, second):
    assert name_replies(made_trace(tmp_path, [turn(0, 6, 5, [1, 2]), second], block_tokens=4), 4) is None


def test_a_name_that_others_use_is_kept(tmp_path):
    """The partial block 2 is shared with another request: at blocks of 2 its first part can be hit by that name."""
    rows = [turn(0, 6, 5, [1, 2]), turn(0, 6, 5, [1, 2], session="t"), turn(1, 14, 3, [1, 3, 4, 5])]
    trace = made_trace(tmp_path, rows, block_tokens=4)
    assert name_replies(trace, 2) is None
    assert named(trace, 4)[0] == ([1, 3, 4], 11), "at blocks of 4 that name has no block, so nothing is lost"


def test_the_next_turn_is_the_first_that_fits_among_the_next_of_the_session(tmp_path):
    """A retry of the same prompt stands between; beyond so many nobody looks."""
    retries = [turn(1 + i, 6, 5, [1, 2]) for i in range(SUCCESSORS_LOOKED_AT)]
    rows = [turn(0, 6, 5, [1, 2]), *retries, turn(99, 14, 3, [1, 3, 4, 5])]
    names = name_replies(made_trace(tmp_path / "a", rows, block_tokens=4), 4)
    assert names.turns == SUCCESSORS_LOOKED_AT, "all but the first, for which it is one too far"
    assert names.named_tokens[0] == 6


def scenario_of(**cache):
    return Scenario.model_validate(
        {
            "fleet": {"gpu": "h100-sxm", "replicas": 1},
            "model": {"name": "llama-3.1-8b"},
            "prefix_cache": {"enabled": True, **cache},
        }
    )


def test_the_engine_hits_the_reply_and_says_that_it_is_inferred(tmp_path):
    """Turn 1: 1,000 tokens and 600 of reply. Turn 2 begins with both: 1,599 tokens of turn 1 have KV, 99 blocks of 16."""
    rows = [turn(0, 1000, 600, [1, 2]), turn(100, 2000, 10, [1, 3, 4, 5])]
    trace = made_trace(tmp_path, rows)
    outcomes, _ = run_scenario(resolve("x", scenario_of(), trace, 10.0), trace, 1)
    assert outcomes["hit_tokens"].to_pylist() == [0, 99 * 16]
    assert outcomes["hit_tokens_inferred"].to_pylist() == [0, 99 * 16 - 512]
    outcomes, _ = run_scenario(resolve("x", scenario_of(replies="private"), trace, 10.0), trace, 1)
    assert outcomes["hit_tokens"].to_pylist() == [0, 512], "the one full block of the prompt that the log names"
    assert outcomes["hit_tokens_inferred"].to_pylist() == [0, 0]
