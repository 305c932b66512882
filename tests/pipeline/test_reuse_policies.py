"""Time to live, the offline optimum and other orders of eviction against the independent oracle, brute force, and each other."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reuse_eviction import POLICIES, _frequency_hits
from pipeline.reuse_policies import drop_top, optimal_hits, push, sink, ttl_hits
from pipeline.trace import read_trace
from schemas.errors import InputError
from tests.conftest import ROOT
from tests.pipeline.test_reuse import prefix_trees, profile_of, profile_of_trace
from tests.reference.reuse import lru_hits, unbounded_hits
from tests.reference.reuse_policies import policy_hits
from tests.test_cli import one_line, preplay

ORACLE_NAMES = {name: name for name in POLICIES} | {"lru_root_first": "lru_head_first"}


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


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_of_the_oracle(name, conversation, expected):
    """Not the sums only: every request's hit."""
    trace, profile = read_trace(conversation), profile_of_trace(conversation)
    oracle = expected["conversation_trace.jsonl"]["policies"]
    assert len(oracle) == 6
    for capacity, policies in oracle.items():
        truth = policies[ORACLE_NAMES[name]]
        hits = POLICIES[name](trace.block_offsets, trace.block_ids, int(capacity))
        assert hits.sum() == truth["hit_blocks"]
        assert profile.tokens_of(hits).sum() == truth["hit_tokens_vllm"]
        assert hashlib.sha256(",".join(map(str, hits.tolist())).encode()).hexdigest() == truth["hits_sha256"]


@settings(max_examples=500, deadline=None)
@given(prefix_trees())
def test_every_policy_equals_brute_force_at_every_capacity(prompts):
    """Prompts of up to 6 blocks: capacities below the longest are among them."""
    for capacity in range(len({block for prompt in prompts for block in prompt}) + 2):
        for name, hits_of in POLICIES.items():
            assert hits_of(*arrays(prompts), capacity).tolist() == policy_hits(prompts, capacity, name), (
                name,
                capacity,
            )


@pytest.mark.parametrize("seed", range(20))
def test_every_policy_equals_brute_force_on_longer_traces(seed):
    """Up to 150 prompts of up to 30 blocks: heaps of several levels, blocks that come back often, prompts too long for the cache."""
    random = np.random.default_rng(seed)
    nodes, prompts = {}, []
    branches, longest = int(random.integers(1, 4)), int(random.integers(2, 31))
    for _ in range(int(random.integers(20, 151))):
        parent, prompt = -1, []
        for _ in range(int(random.integers(0, longest + 1))):
            branch = int(min(random.integers(0, branches + 1, 2)))
            parent = nodes.setdefault((parent, branch), len(nodes))
            prompt.append(parent)
        prompts.append(prompt)
    for capacity in (1, 3, longest, 2 * longest, len(nodes) // 2, len(nodes)):
        for name, hits_of in POLICIES.items():
            assert hits_of(*arrays(prompts), capacity).tolist() == policy_hits(prompts, capacity, name), (
                name,
                capacity,
            )


@settings(max_examples=200, deadline=None)
@given(prefix_trees(), st.integers(0, 12))
def test_the_common_rules_applied_to_lru_are_the_curve(prompts, capacity):
    assert policy_hits(prompts, capacity, "lru") == lru_hits(prompts, capacity)


@settings(max_examples=200, deadline=None)
@given(prefix_trees(), st.integers(0, 12))
def test_no_policy_beats_the_optimum_and_all_reach_the_ceiling(prompts, capacity):
    best = optimal_hits(*arrays(prompts), capacity).sum()
    for hits_of in POLICIES.values():
        assert hits_of(*arrays(prompts), capacity).sum() <= best
        assert hits_of(*arrays(prompts), 10_000).tolist() == unbounded_hits(prompts)
        assert hits_of(*arrays(prompts), 0).sum() == 0


BY_HAND = {
    # Room for two: 2 takes the place of 0, which entered first, though it was used just now; then 0 takes that of 1.
    "fifo": ([[0], [1], [0], [2], [0], [1]], 2, [0, 0, 1, 0, 0, 0]),
    "fifo_leaf": ([[0], [1], [0], [2], [0], [1]], 2, [0, 0, 1, 0, 0, 0]),  # nothing extends anything: the same
    # Room for two: 2 takes the place of 1, used once; 0, used twice, stays.
    "lfu": ([[0], [0], [1], [2], [0], [1]], 2, [0, 1, 0, 0, 1, 0]),
    # Room for three: [0 1] and [2], each used once; 3 takes the place of 1, the deepest, and not of 2, the oldest.
    "length_aware": ([[2], [0, 1], [3], [2], [0, 1]], 3, [0, 0, 0, 1, 1]),
    # Room for three: 0 was touched before 1, so 3 takes its place; 1 stays, and without its prefix can't be hit.
    "lru_root_first": ([[0, 1], [2], [3], [0, 1]], 3, [0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_by_hand(name):
    prompts, capacity, hits = BY_HAND[name]
    assert POLICIES[name](*arrays(prompts), capacity).tolist() == hits


def test_a_prefix_touched_last_outlives_its_extension():
    """The case of lru_root_first above: LRU as the curve has it loses 1 and keeps 0."""
    assert lru_hits(BY_HAND["lru_root_first"][0], 3) == [0, 0, 0, 1]


def test_a_leaf_goes_before_what_it_extends():
    """Room for three. In order of entering: 1, 0 (last one first), 2. Block 5 takes the place of 1; then 4 wants room: FIFO gives
    that of 0, though 5 extends it, and [0 5] hits nothing; among leaves 2 is the oldest, and [0 5] is whole."""
    prompts = [[0, 1], [2], [0, 5], [4], [0, 5]]
    assert POLICIES["fifo"](*arrays(prompts), 3).tolist() == [0, 0, 1, 0, 0]
    assert POLICIES["fifo_leaf"](*arrays(prompts), 3).tolist() == [0, 0, 1, 0, 2]


def test_a_prompt_longer_than_the_cache():
    """Room for two of three blocks: its first two stay. Root first, plain LRU keeps the last two, which nobody can hit."""
    for name, hits_of in POLICIES.items():
        assert hits_of(*arrays([[0, 1, 2], [0, 1, 2]]), 2).tolist() == [0, 0 if name == "lru_root_first" else 2]


def test_counts_that_do_not_fit_are_refused():
    offsets = np.arange(4, dtype=np.int64)
    with pytest.raises(InputError, match="too many requests"):
        _frequency_hits(offsets, np.zeros(3, np.uint32), 1, np.array([2**62, 0, 0]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 30), st.sampled_from(["drop", "sink"])), max_size=60))
def test_the_heap_against_a_sorted_list(operations):
    keys, names = np.zeros(64, np.int64), np.zeros(64, np.int64)
    entries: list[int] = []
    for operation in operations:
        if operation == "drop" and entries:
            entries.remove(max(entries))
            drop_top(keys, names, len(entries) + 1)
        elif operation == "sink" and entries:
            largest = max(entries)
            entries.remove(largest)
            entries.append(largest // 2)
            sink(keys, names, len(entries), largest // 2, -(largest // 2))
        elif isinstance(operation, int):
            push(keys, names, len(entries), operation, -operation)
            entries.append(operation)
        assert sorted(keys[: len(entries)].tolist()) == sorted(entries)
        assert np.array_equal(names[: len(entries)], -keys[: len(entries)])
        assert not entries or keys[0] == max(entries)


def test_policies_on_the_command_line(conversation, expected):
    wanted = [option for name in POLICIES for option in ("--policy", name)]
    code, out, _ = preplay("reuse", conversation, "-c", 1000, "-c", 10000, *wanted, "-f", "json")
    assert code == 0
    truth = expected["conversation_trace.jsonl"]
    for row, capacity in zip(json.loads(out), ("1000", "10000"), strict=True):
        assert row["hit_blocks"] == truth["one_pass"][capacity]
        for name in POLICIES:
            policy = truth["policies"][capacity][ORACLE_NAMES[name]]
            assert row[f"{name}_hit_blocks"] == policy["hit_blocks"]
            assert row[f"{name}_token_ratio"] == policy["hit_tokens_vllm"] / truth["infinite"]["all_tokens"]
    code, out, err = preplay("reuse", conversation, "--policy", "arc")
    assert code == 2 and out == ""
    assert "unknown policy 'arc'; known: fifo, fifo_leaf, length_aware, lfu, lru_root_first" in one_line(err)
    code, out, _ = preplay("reuse", "--help")
    assert code == 0 and all(name in out for name in POLICIES)


def test_the_table_in_the_docs_is_the_oracles(expected):
    truth = expected["conversation_trace.jsonl"]
    lines = (ROOT / "docs/reuse.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| blocks | LRU"))
    names = [cell.strip().strip("`") for cell in head.strip("|").split("|")][2:-1]
    assert sorted(names) == sorted(POLICIES)
    for capacity, policies in truth["policies"].items():
        counts = [policies[ORACLE_NAMES[name]]["hit_blocks"] for name in names]
        row = [int(capacity), truth["one_pass"][capacity], *counts, truth["optimal_hit_blocks"][capacity]]
        assert f"| {' | '.join(f'{cell:,}' for cell in row)} |" in lines
