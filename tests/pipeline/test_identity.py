"""Dense ids against a dictionary of whole prefixes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.identity import BlockIds


def numbered(prompts, scopes, pieces):
    """Dense ids of the prompts, handed over in batches that end at `pieces`."""
    table = BlockIds()
    result = []
    bounds = sorted({0, len(prompts), *[piece for piece in pieces if piece < len(prompts)]})
    for begin, end in itertools.pairwise(bounds):
        batch = prompts[begin:end]
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in batch])]).astype(np.int64)
        raw = np.array([block for each in batch for block in each], np.int64)
        dense = table.dense(offsets, raw, np.array(scopes[begin:end], np.int32))
        result += [dense[offsets[i] : offsets[i + 1]].tolist() for i in range(len(batch))]
    return result, table.count


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.sampled_from([0, 1, -5, 2**62]), max_size=6)), max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_equal_ids_mean_equal_whole_prefixes_under_one_identity(rows, pieces):
    scopes, prompts = [scope for scope, _ in rows], [prompt for _, prompt in rows]
    dense, count = numbered(prompts, scopes, pieces)
    known = {}
    for scope, prompt, ids in zip(scopes, prompts, dense, strict=True):
        for length in range(1, len(prompt) + 1):
            key = (scope, tuple(prompt[:length]))
            assert ids[length - 1] == known.setdefault(key, len(known)), "numbered in the order of first sight"
    assert count == len(known)


def test_a_hash_behind_another_parent_is_another_block():
    dense, count = numbered([[7, 9], [8, 9]], [0, 0], [])
    assert dense == [[0, 1], [2, 3]]
    assert count == 4


def test_the_table_grows():
    """More blocks than the first table holds; every one is found again."""
    prompts = [list(range(start, start + 50)) for start in range(0, 100_000, 50)]
    first, count = numbered(prompts + prompts, [0] * 2 * len(prompts), [700, 1500])
    assert count == 100_000
    assert first[: len(prompts)] == first[len(prompts) :]
