"""Time to live and the offline optimum against the independent oracle, brute force, and each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reuse_policies import optimal_hits, ttl_hits
from pipeline.trace import read_trace
from tests.pipeline.test_reuse import prefix_trees, profile_of, profile_of_trace
from tests.reference.reuse import lru_hits, unbounded_hits


def arrays(prompts):
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in prompts])]).astype(np.int64)
    return offsets, np.array([block for each in prompts for block in each], np.uint32)


def test_every_ttl_of_the_oracle(conversation, expected):
    trace, profile = read_trace(conversation), profile_of_trace(conversation)
    for key, refresh in (("ttl_ms_refresh", True), ("ttl_ms_no_refresh", False)):
        for ttl_ms, truth in expected["conversation_trace.jsonl"][key].items():
            hits = ttl_hits(trace.block_offsets, trace.block_ids, trace.arrival_us, int(ttl_ms) * 1000, refresh=refresh)
            assert hits.sum() == truth["hit_blocks"]
            assert profile.tokens_of(hits).sum() == truth["hit_tokens_vllm"]


def test_every_optimum_of_the_oracle(conversation, expected):
    trace = read_trace(conversation)
    for capacity, truth in expected["conversation_trace.jsonl"]["optimal_hit_blocks"].items():
        assert optimal_hits(trace.block_offsets, trace.block_ids, int(capacity)).sum() == truth


@settings(max_examples=200, deadline=None)
@given(prefix_trees(), st.integers(0, 12))
def test_the_optimum_bounds_lru_and_reaches_the_ceiling(prompts, capacity):
    best = optimal_hits(*arrays(prompts), capacity)
    assert best.sum() >= sum(lru_hits(prompts, capacity))
    assert np.all(best <= unbounded_hits(prompts))
    assert optimal_hits(*arrays(prompts), 10_000).tolist() == unbounded_hits(prompts)
    assert optimal_hits(*arrays(prompts), 0).sum() == 0


def exhaustive(prompts, capacity):
    """The best over every choice of reuses to keep: at most `capacity` intervals may overlap between two requests."""
    intervals = []
    for block in {each for prompt in prompts for each in prompt}:
        uses = [number for number, prompt in enumerate(prompts) if block in prompt]
        intervals += itertools.pairwise(uses)
    for size in range(len(intervals), 0, -1):
        for kept in itertools.combinations(intervals, size):
            if all(sum(a <= gap < b for a, b in kept) <= capacity for gap in range(len(prompts))):
                return size
    return 0


@settings(max_examples=60, deadline=None)
@given(prefix_trees(), st.integers(1, 4))
def test_the_optimum_is_optimal(prompts, capacity):
    prompts = prompts[:6]
    if sum(len(each) for each in prompts) - len({each for prompt in prompts for each in prompt}) <= 10:
        assert optimal_hits(*arrays(prompts), capacity).sum() == exhaustive(prompts, capacity)


def test_ttl_by_hand():
    """One block used at 0, 5 and 12 s. A life of 6 s: from the last use, alive at 5, dead at 12; of 7 s: alive at both. From
    the write at 0, 7 s reach 5 but not 12."""
    offsets, ids = arrays([[0], [0], [0]])
    at = np.array([0, 5_000_000, 12_000_000], np.int64)
    assert ttl_hits(offsets, ids, at, 6_000_000).tolist() == [0, 1, 0]
    assert ttl_hits(offsets, ids, at, 7_000_000).tolist() == [0, 1, 1]
    assert ttl_hits(offsets, ids, at, 7_000_000, refresh=False).tolist() == [0, 1, 0]


@pytest.mark.parametrize("refresh", [True, False])
def test_a_long_life_is_no_limit(refresh):
    prompts = [[0, 1], [0, 2], [0, 1, 3], [0, 1, 3]]
    offsets, ids = arrays(prompts)
    at = np.arange(4, dtype=np.int64)
    assert ttl_hits(offsets, ids, at, 10, refresh=refresh).tolist() == unbounded_hits(prompts)
    assert profile_of(prompts).hit_blocks().tolist() == unbounded_hits(prompts)
