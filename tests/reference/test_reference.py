"""The reference engine against numbers worked out by hand from docs/replay.md; every step takes one second."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings

from tests.reference import ReferenceConfig, RequestSpec, mix, uniform
from tests.reference.engine import ReferenceResult, replay
from tests.reference.strategies import busy_case, traces_and_configs

UNIT = (0.25, 0.125, 0.0625, 0.0625, 0.125, 0.25, 0.125)
"""Adds up to 1.0 without rounding: target parts 0.5, sampling 0.125, draft 0.25, overhead 0.125."""


class Asked(NamedTuple):
    """The features of docs/replay.md."""

    sampled: int = 0
    decode_rows: int = 0
    decode_tokens: int = 0
    decode_context: int = 0
    decode_longest: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    prefill_tiles: int = 0
    prefill_units: int = 0
    prefill_longest: int = 0
    tiles_most: int = 0
    draft_passes: int = 0


def run(*specs: tuple, **changes) -> tuple[ReferenceResult, list[Asked]]:
    """Replay (arrival, input, output, ids) with blocks of 4 tokens; the result, and what the cost model was asked."""
    trace = [RequestSpec(*spec) for spec in specs]
    block = changes.setdefault("block_tokens", 4)
    changes.setdefault("trace_block_tokens", block)
    blocks = changes.setdefault("pool_blocks", 20)
    changes.setdefault("max_model_len", blocks * block)
    config = ReferenceConfig(**({"replicas": 1, "max_batched_tokens": 100, "max_sequences": 8} | changes))
    asked: list[Asked] = []
    result = replay(trace, config, lambda *features: asked.append(Asked(*features)) or UNIT)
    return result, asked


def prefill(rows: int, tokens: int, context: int, **more: int) -> Asked:
    """What a step of short prefilling rows asks: every one is a tile of 64 queries, with one block of 128 keys."""
    return Asked(
        sampled=rows + more.get("decode_rows", 0), prefill_rows=rows, prefill_tokens=tokens, prefill_context=context,
        prefill_tiles=rows, prefill_units=rows, prefill_longest=1, tiles_most=1,
    )._replace(**more)  # fmt: skip


def each(result: ReferenceResult, name: str) -> list:
    return [getattr(request, name) for request in result.requests]


def free(result: ReferenceResult) -> list[int]:
    return [block.number for block in result.replicas[0].pool.free]


# The hash


def test_mix_is_splitmix64():
    """The published stream for seed 0: the n-th output mixes the state (n - 1) times the increment."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for n, output in enumerate(published):
        assert mix(n * 0x9E3779B97F4A7C15 % 2**64) == output


def test_uniform_is_the_first_53_bits():
    """u(0, request, position) starts from mix(0), the stream's first output, and chains from there."""
    last = mix(mix(0xE220A8397B1DCDAF ^ 7) ^ 11)
    assert uniform(0, 7, 11) == int(f"{last:064b}"[:53], 2) / 2**53


# The pool, through the engine


def test_documented_vector_of_vllm():
    """vLLM's prefix_caching.md, with unhashed blocks freed to the front (its #42656).

    R0 computes 15 tokens in blocks 0-3 at t=0, fills block 3 at t=1, begins block 4 at t=2, where R1 hits 0 and 1 (8 tokens)
    and takes 5 and 6. Both end at t=3: R0 frees 4 (blank, to the front), 3, 2; R1 frees 6 (blank, to the front), 5, 1, 0.
    R2, 29 tokens, hits 0, 1, 2 (12 tokens) and needs 8 - 3 = 5 blocks: 6-4-7-8-9, all blank, so nothing is evicted.
    It leaves 3 and 5 in the queue, and frees 9 (29 = 7 * 4 + 1: blank, to the front), then 8, 7, 4, 6, 2, 1, 0.
    """
    r0, r1, r2 = (0, 15, 3, [1, 2, 3, 4]), (1.5, 14, 1, [1, 2, 5]), (10, 29, 1, [1, 2, 3, 6, 7, 8, 9])
    before, _ = run(r0, r1, pool_blocks=10, prefix_caching=True)
    assert free(before) == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    result, asked = run(r0, r1, r2, pool_blocks=10, prefix_caching=True)
    assert each(result, "hit_tokens") == [0, 8, 12]
    assert each(result, "scheduled_s") == [0, 2, 10]
    assert each(result, "finish_s") == [3, 3, 11]
    assert asked[-1] == prefill(1, 17, 29)
    assert free(result) == [9, 3, 5, 8, 7, 4, 6, 2, 1, 0]
    assert result.evicted_blocks == 0


def test_a_hit_in_the_same_step():
    """Registered at scheduling: r1 hits the two blocks that r0, scheduled just before it, is about to compute."""
    result, asked = run((0, 9, 1, [1, 2]), (0, 9, 1, [1, 2]), prefix_caching=True)
    assert each(result, "hit_tokens") == [0, 8]
    # r0: 9 * 10 / 2 = 45 pairs over 9; r1: 1 * 8 + 1 = 9 pairs over 9. Two shared blocks, and one each.
    assert asked == [prefill(2, 10, 18)]
    assert result.timelines[0][0]["kv_used_blocks_mean"] == 4


def test_at_least_one_token_is_computed():
    """8 tokens, both blocks resident: (8 - 1) // 4 = 1 may be hit, the other is computed again, as a second copy.

    Queue: r0 holds 0, 1; leaves 2..7, 1, 0. r1 hits 0, takes 2, registers a copy; leaves 3..7, 1, 2, 0. r2 (9 tokens, at
    most 2 hits) hits 0 and the copy registered first, 1; takes 3, which stays blank and comes back to the front.
    """
    result, asked = run((0, 8, 1, [1, 2]), (5, 8, 1, [1, 2]), (9, 9, 1, [1, 2]), pool_blocks=8, prefix_caching=True)
    assert each(result, "hit_tokens") == [0, 4, 8]
    assert asked[1] == prefill(1, 4, 8)
    assert asked[2] == prefill(1, 1, 9)  # one token, but its first: a prefill row
    assert free(result) == [3, 4, 5, 6, 7, 2, 1, 0]


@pytest.mark.parametrize(("drop", "hits"), [(False, [0, 12, 4]), (True, [0, 8, 0])])
def test_a_drafter_of_hidden_states_drops_the_last_hit(drop, hits):
    """13 tokens hit (13 - 1) // 4 = 3 blocks, 5 tokens hit one; one less each, and not below none."""
    long = (13, 1, [1, 2, 3, 4])
    result, _ = run((0, *long), (5, *long), (9, 5, 1, [1]), prefix_caching=True, drop_last_hit_block=drop)
    assert each(result, "hit_tokens") == hits


@pytest.mark.parametrize(("ids", "hits"), [([1, 2], 12), ([1], 8), ([], 0), (None, 0)])
def test_what_the_trace_names_can_be_shared(ids, hits):
    """14 tokens, trace blocks of 8, engine blocks of 4: (1,0), (1,1), and (2,0) if the partial block has a name."""
    result, _ = run((0, 14, 1, ids), (5, 14, 1, ids), trace_block_tokens=8, prefix_caching=True)
    assert each(result, "hit_tokens") == [0, hits]


def test_a_hit_can_end_inside_a_trace_block():
    """8 tokens are one trace block, of which (8 - 1) // 4 = 1 of 2 engine blocks may be hit."""
    result, _ = run((0, 8, 1, [1]), (5, 8, 1, [1]), trace_block_tokens=8, prefix_caching=True)
    assert each(result, "hit_tokens") == [0, 4]


# The scheduler


def test_a_prompt_is_cut_into_chunks_by_the_budget():
    """Budget 8; r0 of 20 tokens: 8, 8, 4; r1 of 6 gets what is left: 4 at t=2, 2 at t=3, while r0 decodes.

    Blocks held: 2; 4; 5 + 1; 6 (21 tokens) + 2. Waiting: r1 in the first two steps.
    """
    result, asked = run((0, 20, 2, None), (0, 6, 1, None), max_batched_tokens=8)
    assert asked == [
        prefill(1, 8, 8),
        prefill(1, 8, 16),
        prefill(2, 8, 20 + 4),
        prefill(1, 2, 6, decode_rows=1, decode_tokens=1, decode_context=21, decode_longest=21),
    ]
    assert each(result, "scheduled_s") == [0, 2]
    assert (each(result, "first_token_s"), each(result, "finish_s")) == ([3, 4], [4, 4])
    row = result.timelines[0][0]
    assert (row["prefill_tokens"], row["decode_tokens"], row["emitted_tokens"]) == (26, 1, 3)
    assert (row["waiting_mean"], row["running_mean"], row["kv_used_blocks_mean"]) == (2, 6, 2 + 4 + 6 + 8)


def test_who_finds_no_blocks_waits_and_is_not_overtaken():
    """4 blocks: r0 takes 3; r1 needs 2 and ends the phase, though r2 would need just 1. r0 ends at t=2."""
    result, _ = run((0, 12, 2, None), (0, 8, 1, None), (0, 4, 1, None), pool_blocks=4)
    assert each(result, "scheduled_s") == [0, 2, 2]
    assert each(result, "finish_s") == [2, 3, 3]


def test_no_more_sequences_than_allowed():
    result, _ = run((0, 1, 2, None), (0, 1, 1, None), (0, 1, 1, None), max_sequences=1)
    assert each(result, "scheduled_s") == [0, 2, 3]


def test_the_last_admitted_is_preempted_and_hits_its_own_blocks():
    """6 blocks of 2; both prompts have 4 tokens: 2 + 2 blocks at t=0, 3 + 3 at t=1 and t=2, all full at t=2.

    t=3: r0 needs its 4th. r1 is preempted with 6 tokens computed, frees its blocks 2, 1, 0; r0 takes (evicts) r1's 2.
    t=4: r1 (7 tokens) would hit 2 blocks that nobody holds and needs 2 more, with 2 free: it waits. r0 ends at t=5 and
    frees 3, 2, 1, 0 behind r1's. t=5: r1 hits 2 blocks (4 tokens), recomputes 6 - 4 = 2, evicts r0's 3 and 2, ends.
    """
    result, asked = run((0, 4, 5, None), (0, 4, 4, None), block_tokens=2, pool_blocks=6, prefix_caching=True)
    assert each(result, "first_token_s") == [1, 1]
    assert each(result, "finish_s") == [5, 6]
    assert each(result, "preemptions") == [0, 1]
    assert each(result, "recomputed_tokens") == [0, 2]
    assert each(result, "hit_tokens") == [0, 0]  # at the first admission only
    assert each(result, "emitting_steps") == [5, 4]
    assert result.evicted_blocks == 3
    assert asked[5] == prefill(1, 3, 7)  # more than one token to compute: a prefill row again
    # r1 ran in the steps at t=1, 2 and 5 after its first token; r0 in those at t=1, 2, 3, 4.
    assert each(result, "decode_target_s") == [2.0, 1.5]
    assert each(result, "decode_draft_s") == [1.0, 0.75]
    assert each(result, "first_output_s") == [0.375, 0.375]  # sampling and draft
    row = result.timelines[0][0]
    assert (row["preemptions"], row["evicted_blocks"], row["hit_tokens"]) == (1, 3, 0)
    assert (row["prefill_tokens"], row["decode_tokens"]) == (8 + 3, 2 + 2 + 1 + 1)
    assert (row["waiting_mean"], row["running_mean"]) == (2, 2 + 2 + 2 + 1 + 1 + 1)
    assert (row["kv_used_blocks_mean"], row["kv_cached_blocks_mean"]) == (4 + 6 + 6 + 4 + 4 + 4, 2 + 2 + 2)


def test_a_request_can_preempt_itself_and_goes_to_the_head():
    """5 blocks of 1: at t=2 r0 takes the fifth; r1 needs one and is the last admitted. Nobody is admitted in that step,
    though r1 could have 2 tokens (budget 3) in 2 blocks; at t=3 it takes the budget before r2, which waits since t=2."""
    trace = (0, 1, 3, None), (0, 1, 3, None), (1.5, 1, 1, None)
    result, asked = run(*trace, block_tokens=1, pool_blocks=5, max_batched_tokens=3)
    assert each(result, "preemptions") == [0, 1, 0]
    assert each(result, "recomputed_tokens") == [0, 2, 0]
    assert each(result, "scheduled_s") == [0, 0, 4]
    assert each(result, "finish_s") == [3, 4, 5]
    batches = [(each.decode_tokens + each.prefill_tokens, each.decode_rows + each.prefill_rows) for each in asked]
    assert batches == [(2, 2), (2, 2), (1, 1), (3, 1), (1, 1)]


def test_too_long_prompts_are_refused_and_outputs_end_at_the_limit():
    """M = 10: a prompt of 10 is refused; 9 leave room for one token, 6 for four. The refused one keeps its turn."""
    result, _ = run((0, 10, 1, None), (0, 9, 5, None), (0, 6, 100, None), max_model_len=10, replicas=2)
    assert each(result, "status") == ["refused", "completed", "completed"]
    assert each(result, "output_tokens") == each(result, "emitted") == [0, 1, 4]
    assert each(result, "replica") == [0, 1, 0]
    assert [timeline[0]["arrivals"] for timeline in result.timelines] == [1, 1]
    assert each(result, "finish_s") == [None, 1, 4]


def test_a_row_of_lower_priority_is_taken_back():
    """Blocks of 1, budget 4. B (priority 2) runs from t=0, C (0) and D (1, a prompt of 9) from t=1: D gets what is left, 2 a step.

    At t=3 nine of ten blocks are held. B's fourth block is the last; C needs one. B is the victim although its row is scheduled: its 4
    blocks and its token come back. C takes a block, D 3 tokens instead of 2, in 3 blocks.
    """
    b, c, d = (0, 1, 9, None, 2), (0.5, 1, 9, None, 0), (0.6, 9, 1, None, 1)
    result, asked = run(
        b, c, d, block_tokens=1, pool_blocks=10, max_batched_tokens=4, scheduling="priority", reserve_full_isl=False
    )  # fmt: skip
    assert asked[2] == prefill(1, 2, 4, decode_rows=2, decode_tokens=2, decode_context=3 + 2, decode_longest=3)
    assert asked[3] == prefill(1, 3, 7, decode_rows=1, decode_tokens=1, decode_context=3, decode_longest=3)
    assert result.requests[0].preemptions >= 1


def test_the_waiting_go_by_priority_then_arrival():
    trace = [(0, 2, 1, None, 0), (0.1, 2, 1, None, 2), (0.2, 2, 1, None, 1), (0.3, 2, 1, None, 1), (0.4, 2, 1, None, 2)]
    result, _ = run(*trace, max_sequences=1, scheduling="priority")
    assert each(result, "scheduled_s") == [0, 3, 1, 2, 4]


def test_the_longest_prefix_goes_first_and_one_computes_for_the_others():
    """r0 leaves ids 1 2 in the cache. Of those that wait at t=2 r3 hits 8 tokens and goes first. r1 and r2 hit nothing and share
    their first 4 tokens: r2 goes behind r4, which hits nothing either but shares with nobody. One sequence at a time."""
    r0 = (0, 9, 2, [1, 2])
    waiting = [(0.1, 9, 1, [5, 6]), (0.2, 9, 1, [5, 7]), (0.3, 9, 1, [1, 2]), (0.4, 9, 1, [8, 9])]
    result, _ = run(
        r0, *waiting, max_sequences=1, prefix_caching=True, scheduling="longest_prefix", lpm_shared_tokens=4
    )
    # At t=3 r1 is noted again, first in the order r1 r4 r2; at t=4 r2 hits r1's first block and overtakes r4.
    assert each(result, "scheduled_s") == [0, 3, 4, 2, 5]
    assert each(result, "hit_tokens") == [0, 0, 4, 8, 0]


def test_what_each_policy_evicts():
    """Three blocks of 4. X (id 1), Y (id 2) and X again leave X used twice and released last; one more block is needed then.

    One block stays blank for the token after each prompt. LRU and LFU take Y, FIFO takes X, which was registered first, and so does
    prefix_priority for nothing: both are a sequence's first block, and Y was released before.
    """
    x, y, z = [1], [2], [3]
    trace = [(0, 5, 1, x), (10, 5, 1, y), (20, 5, 1, x), (30, 5, 1, z), (40, 5, 1, x), (50, 5, 1, y)]
    hits = {
        policy: each(run(*trace, pool_blocks=3, prefix_caching=True, policy=policy, priority_blocks=1)[0], "hit_tokens")
        for policy in ("lru", "lfu", "fifo", "prefix_priority")
    }
    assert hits["lru"] == hits["prefix_priority"] == hits["lfu"] == [0, 0, 4, 0, 4, 0]
    assert hits["fifo"][:5] == [0, 0, 4, 0, 0]


def test_a_time_to_live_of_five_seconds():
    """X is released at t=1. A use 5 s later still hits and renews it (lru); 5.5 s later it is gone. From its registration at t=0
    (fifo), which a use does not renew, 5 s later is t=5."""
    trace = [(0, 5, 1, [1]), (6, 5, 1, [1]), (12, 5, 1, [1]), (18.5, 5, 1, [1])]
    renewed, _ = run(*trace, prefix_caching=True, policy="lru", ttl_s=5.0)
    assert each(renewed, "hit_tokens") == [0, 4, 4, 0]
    assert renewed.timelines[0][1]["expired_blocks"] == 1, "at 13 + 5, in the second ten seconds; the last one stays"
    written, _ = run(*trace, prefix_caching=True, policy="fifo", ttl_s=5.0)
    assert each(written, "hit_tokens") == [0, 0, 0, 0]


def test_merged_copies_give_their_blocks_back():
    """Both compute id 1 in the same step, visible after it: two blocks for it when kept, one when merged."""
    trace = (0, 5, 3, [1]), (0, 5, 3, [1])
    for merged, blocks in ((False, 4), (True, 3)):
        result, _ = run(*trace, prefix_caching=True, visible="step", merge_duplicates=merged, interval_s=1.0)
        assert result.timelines[0][1]["kv_used_blocks_mean"] == blocks


def test_gaps_between_tokens():
    """Emissions at t = 1, 2, 3, then a preemption of two steps: the longest gap is 3 s; numpy's linear 99th percentile of 1, 1, 3."""
    result, _ = run((0, 2, 4, None))
    assert (result.requests[0].itl_max_s, result.requests[0].itl_p99_s) == (1, 1)
    single, _ = run((0, 2, 1, None))
    assert single.requests[0].itl_max_s is None


# Speculation


def test_drafts_are_cut_by_the_budget():
    """k = 3, all accepted, budget 6. At t=1 r0 verifies 3 drafts with 4 tokens, r1 has 2 tokens left: 1 draft of 3."""
    result, asked = run((0, 2, 9, None), (0, 2, 5, None), max_batched_tokens=6, conditional_acceptance=(1.0, 1.0, 1.0))
    assert asked[0] == prefill(2, 4, 4, draft_passes=3)
    assert asked[1] == Asked(
        sampled=2 + 4, decode_rows=2, decode_tokens=6, decode_context=6 + 4, decode_longest=6, tiles_most=1, draft_passes=3
    )  # fmt: skip
    assert each(result, "finish_s") == [3, 3]  # 1 + 4 + 4 tokens; 1 + 2 + 2
    assert each(result, "draft_tokens") == each(result, "accepted_tokens") == [6, 2]
    assert each(result, "truncated_drafts") == [0, 4]
    assert each(result, "emitting_steps") == [3, 3]


def test_rejected_drafts_are_rewound_but_had_their_blocks():
    """k = 2, none accepted, 3 tokens: at admission 3 + 2 = 5 slots need 2 blocks; then 3 + 3 + 2 = 8 need 2, 4 + 3 + 2 = 9
    need 3. Each step emits one token."""
    result, asked = run((0, 3, 3, None), conditional_acceptance=(0.0, 0.0))
    assert [(each.decode_tokens, each.decode_context) for each in asked] == [(0, 0), (3, 6), (3, 7)]
    assert result.timelines[0][0]["kv_used_blocks_mean"] == 2 + 2 + 3
    assert (each(result, "draft_tokens"), each(result, "accepted_tokens")) == ([4], [0])
    assert each(result, "finish_s") == [3]


def test_what_passes_the_end_of_the_output_is_trimmed():
    """1 token, then 3 drafts and one more with 2 tokens to go: 2 trimmed; 2 steps + 3 accepted - 2 = 3 tokens."""
    result, _ = run((0, 2, 3, None), conditional_acceptance=(1.0, 1.0, 1.0))
    assert (each(result, "accepted_tokens"), each(result, "trimmed_tokens")) == ([3], [2])
    assert (each(result, "emitting_steps"), each(result, "emitted")) == ([2], [3])


def test_drafts_do_not_pass_the_longest_sequence():
    """M = 10, 6 tokens computed of 7: min(1 + 3, 10 - 1 - 6) = 3 tokens, 2 drafts, 3 emitted: the output's four."""
    result, _ = run((0, 6, 9, None), max_model_len=10, conditional_acceptance=(1.0, 1.0, 1.0))
    assert (each(result, "draft_tokens"), each(result, "trimmed_tokens")) == ([2], [0])
    assert each(result, "finish_s") == [2]


def test_luck_belongs_to_the_output_position():
    """After the first token, draft 1 stands at position 1, draft 2 at position 2; the rate must be above the luck."""
    first, second = uniform(5, 0, 1), uniform(5, 0, 2)
    for rates, accepted in [
        ((first, 1.0), 0),
        ((math.nextafter(first, 1), second), 1),
        ((math.nextafter(first, 1), math.nextafter(second, 1)), 2),
    ]:
        result, _ = run((0, 2, 1 + 1 + accepted, None), seed=5, conditional_acceptance=rates)
        assert each(result, "accepted_tokens") == [accepted]
        assert each(result, "finish_s") == [2]


# Time


def test_a_step_belongs_to_where_it_starts_and_idling_is_cut_at_borders():
    """Intervals of 2 s. r0 runs 0-1, and leaves one cached block to the idle time 1-5: 1 s, 2 s, 1 s. r1 (same block, but
    it must compute a token) runs in the steps at 5 and 6 on a second block, then a third for its second token."""
    result, _ = run((0, 4, 1, [1]), (5, 4, 2, [1]), prefix_caching=True, interval_s=2.0)
    timeline = result.timelines[0]
    assert [timeline[n].get("kv_cached_blocks_mean", 0) for n in range(4)] == [1, 2, 1 + 1, 1]
    assert [timeline[n].get("kv_used_blocks_mean", 0) for n in range(4)] == [1, 0, 1, 2]
    assert [timeline[n].get("arrivals", 0) for n in range(4)] == [1, 0, 1, 0]
    assert [timeline[n].get("finished", 0) for n in range(4)] == [1, 0, 0, 1]
    assert [timeline[n].get("gemm_s", 0) for n in range(4)] == [0.25, 0, 0.25, 0.25]


# Whatever the trace


def what_happened(result: ReferenceResult, config: ReferenceConfig) -> set[str]:
    names = ("preemptions", "recomputed_tokens", "hit_tokens", "accepted_tokens", "trimmed_tokens", "truncated_drafts")
    happened = {name for name in names if any(each(result, name))}
    happened |= {"refused"} if "refused" in each(result, "status") else set()
    happened |= {"clipped"} if any(r.spec.output_tokens > r.emitted > 0 for r in result.requests) else set()
    happened |= {"evicted"} if result.evicted_blocks else set()
    split = any(r.hit_tokens % config.trace_block_tokens for r in result.requests)
    return happened | ({"hit inside a trace block"} if split else set())


@settings(max_examples=300, deadline=None)
@given(traces_and_configs())
def test_invariants_hold_on_any_trace(case):
    """They are asserted inside the engine, at every step; and it comes to an end."""
    specs, config = case
    result = replay(specs, config, lambda *features: UNIT)
    for name in sorted(what_happened(result, config)):
        event(name)


def test_crowded_cases_are_crowded():
    """A case in which nothing happens proves nothing."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        specs, config = busy_case(seed)
        seen.update(what_happened(replay(specs, config, lambda *features: UNIT), config))
    assert len(seen) == 10 and min(seen.values()) >= 30, seen


def test_a_prompt_is_admitted_only_if_all_of_it_fits():
    """Pool of 6 blocks of 4. A (8 + 8 tokens) holds 2 to 4 blocks until its last token at second 8. B (20 tokens) needs 5 blocks
    as a whole, its first chunk of 8 only 2: with the whole sequence reserved it waits until A is done."""
    config = {"pool_blocks": 6, "max_batched_tokens": 8}
    whole, _ = run((0, 8, 8, None), (0, 20, 1, None), **config)
    chunk, _ = run((0, 8, 8, None), (0, 20, 1, None), reserve_full_isl=False, **config)
    assert each(whole, "scheduled_s") == [0, 8]
    assert each(whole, "preemptions") == [0, 0]
    assert each(chunk, "scheduled_s") == [0, 1]
    assert each(chunk, "preemptions")[1] >= 1
