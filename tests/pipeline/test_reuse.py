"""Reuse against the independent oracle, against brute force, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reuse import NEVER, reuse_profile
from pipeline.reuse_tables import curve_table, distance_table
from pipeline.trace import read_trace
from schemas.errors import InputError
from tests.reference.reuse import lru_hits, unbounded_hits


def profile_of_trace(path):
    trace = read_trace(path)
    return reuse_profile(trace.block_offsets, trace.block_ids, trace.input_tokens, trace.meta.block_tokens)


def profile_of(prompts, block_tokens=4, lengths=None):
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in prompts])]).astype(np.int64)
    ids = np.array([block for each in prompts for block in each], np.uint32)
    lengths = [max(1, len(each) * block_tokens) for each in prompts] if lengths is None else lengths
    return reuse_profile(offsets, ids, np.array(lengths, np.int32), block_tokens)


@pytest.mark.parametrize(
    ("fixture", "name"), [("conversation", "conversation_trace.jsonl"), ("synthetic", "synthetic_trace.jsonl")]
)
def test_every_number_of_the_oracle(fixture, name, expected, request):
    profile = profile_of_trace(request.getfixturevalue(fixture))
    truth = expected[name]
    infinite = truth["infinite"]
    assert profile.accesses == infinite["all_blocks"]
    assert profile.distinct_blocks == truth["distinct_blocks"]
    assert profile.hit_blocks().sum() == infinite["hit_blocks"]
    assert profile.hit_tokens().sum() == infinite["hit_tokens_vllm"]
    assert np.mean(profile.hit_blocks() > 0) == pytest.approx(infinite["any_hit"], abs=1e-6)
    curve = profile.curve()
    assert curve.all_tokens == infinite["all_tokens"]
    assert {int(c): curve.at(int(c))[0] for c in truth["lru_curve_hit_blocks"]} == {
        int(c): hits for c, hits in truth["lru_curve_hit_blocks"].items()
    }
    assert {c: curve.at(int(c))[0] for c in truth["one_pass"]} == truth["one_pass"]
    reached = int(np.flatnonzero(curve.hit_blocks == infinite["hit_blocks"])[0])
    assert curve.capacity_blocks[reached] == truth["smallest_capacity_reaching_infinite"]
    assert curve.at(10**12) == (infinite["hit_blocks"], infinite["hit_tokens_vllm"])
    assert curve.at(0) == (0, 0)


def test_reuse_ratio_of_an_independent_engine(conversation):
    """NVIDIA Dynamo 1.6.1's offline replay reports 0.3734 on this trace: one worker, blocks of 512, never full."""
    profile = profile_of_trace(conversation)
    assert round(profile.hit_tokens().sum() / profile.input_tokens.sum(dtype=np.int64), 4) == 0.3734


@st.composite
def prefix_trees(draw):
    """Prompts whose blocks are nodes of a tree."""
    nodes = {}
    prompts = []
    for _ in range(draw(st.integers(0, 14))):
        parent, prompt = -1, []
        for branch in draw(st.lists(st.sampled_from([0, 0, 1, 2]), max_size=6)):
            parent = nodes.setdefault((parent, branch), len(nodes))
            prompt.append(parent)
        prompts.append(prompt)
    return prompts


@settings(max_examples=400, deadline=None)
@given(prefix_trees())
def test_equals_brute_force_at_every_capacity(prompts):
    profile = profile_of(prompts)
    assert profile.hit_blocks().tolist() == unbounded_hits(prompts)
    curve = profile.curve()
    for capacity in range(profile.distinct_blocks + 2):
        assert curve.at(capacity)[0] == sum(lru_hits(prompts, capacity)), capacity


def test_many_words_of_touches_equal_brute_force():
    """Over 64 touches, so that several words and several levels of the tree take part."""
    random = np.random.default_rng(7)
    nodes, prompts = {}, []
    for _ in range(150):
        parent, prompt = -1, []
        for _ in range(int(random.integers(1, 12))):
            parent = nodes.setdefault((parent, int(random.integers(0, 2))), len(nodes))
            prompt.append(parent)
        prompts.append(prompt)
    curve = profile_of(prompts).curve()
    for capacity in (1, 2, 5, 9, 17, 33):
        assert curve.at(capacity)[0] == sum(lru_hits(prompts, capacity))


def test_last_token_is_always_computed():
    """Two equal prompts of exactly two blocks of 4: the second may reuse one block only. Of 9 tokens: both."""
    assert profile_of([[0, 1], [0, 1]], lengths=[8, 8]).hit_tokens().tolist() == [0, 4]
    assert profile_of([[0, 1], [0, 1]], lengths=[9, 9]).hit_tokens().tolist() == [0, 8]


def test_partial_last_block_counts_as_block_and_not_as_tokens():
    """Prompts of 6 tokens, blocks of 4, the partial block named: 2 block hits, 4 tokens."""
    profile = profile_of([[0, 1], [0, 1]], lengths=[6, 6])
    assert profile.hit_blocks().tolist() == [0, 2]
    assert profile.hit_tokens().tolist() == [0, 4]


def test_distances_are_binned_by_powers_of_two():
    """a b c d, then a again: three others were touched since, so its distance is 3, in the bin from 2 to 4."""
    profile = profile_of([[0], [1], [2], [3], [0]])
    assert profile.positions.tolist() == [NEVER, NEVER, NEVER, NEVER, 3]
    rows = distance_table(profile).to_pylist()
    assert [row for row in rows if row["accesses"]] == [{"from_blocks": 2, "below_blocks": 4, "accesses": 1}]


def test_no_requests_no_hits():
    assert profile_of([]).curve().at(5) == (0, 0)
    assert curve_table(profile_of([[], []], lengths=[3, 3])).num_rows == 1


def test_ids_that_are_not_dense_are_refused():
    with pytest.raises(InputError, match="not dense"):
        profile_of([[4_000_000_000]])
