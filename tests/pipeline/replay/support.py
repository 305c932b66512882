"""Running the compiled engine on the reference engine's inputs, and comparing the two."""

from __future__ import annotations

import numpy as np

from pipeline.cost.attention import CONTEXT_NODES
from pipeline.cost.lowered import LoweredCost, MixedAttention, step_components
from pipeline.replay.engine import Arrivals, EngineConfig, ReplayResult, replay
from pipeline.replay.segments import (
    BLANK,
    BLOCKS,
    CACHED,
    CAPACITY,
    FIRST_COPY,
    HAS_BLOCKS,
    HAS_REGISTERED,
    HEAP_SIZE,
    ID,
    ID_NEXT,
    ID_PREVIOUS,
    KEY,
    LAST_COPY,
    LRU,
    MERGE_DUPLICATES,
    NEXT,
    NONE,
    POLICY,
    PREVIOUS,
    QUEUE_HEAD,
    REFS,
    START,
    UNHASHED,
    Pool,
)
from pipeline.replay.speculation import Drafting
from schemas.outcome import COMPONENTS, TIMELINE_COUNTERS, TIMELINE_INTEGRALS
from tests.reference import engine as reference

MAX_TOKENS, MAX_ROWS, MAX_DRAFTS = 128, 8, 12


def some_cost() -> LoweredCost:
    """A cost of small numbers, every term different, so that no two terms can be mistaken for each other."""
    tokens = np.arange(MAX_TOKENS + 1)
    rows = np.arange(MAX_ROWS + 1)
    sampled = np.arange(MAX_ROWS * (1 + MAX_DRAFTS) + 1)
    return LoweredCost(
        gemm=0.02 + 0.003 * tokens + 0.0001 * tokens**2,
        communication=0.001 + 0.0007 * tokens,
        sampling=0.002 + 0.0005 * sampled,
        draft_first=0.004 + 0.0003 * tokens,
        draft_row=0.0011 * rows,
        draft_later=0.003 + 0.0013 * rows,
        decode=np.stack([_some_decode(scale) for scale in ATTENTION_SCALES]),
        mixed=np.array([_some_attention(scale) for scale in ATTENTION_SCALES]),
        window=9.0,
        draft_window=6.0,
        draft_share=0.0,
        overhead_step=0.005,
        overhead_row=0.0009,
    )


ATTENTION_SCALES = (1.0, 0.4, 0.07, 0.05)
"""Of the target, its windowed layers, the drafter, its windowed layers."""


def _some_decode(scale: float) -> np.ndarray:
    nodes, rows = np.array(CONTEXT_NODES), np.arange(MAX_ROWS + 1)[:, None]
    return scale * (0.003 + 0.0007 * rows + 2.3e-5 * rows * nodes**1.1)


def _some_attention(scale: float) -> MixedAttention:
    """Every term is felt at the sizes of small cases."""
    return MixedAttention(
        launch=0.002 * scale,
        block=0.0004 * scale,
        unit=0.003 * scale,
        query=0.00013 * scale,
        empty=0.0002 * scale,
        longest_block=0.0011 * scale,
        longest_unit=0.0023 * scale,
        stall=0.3,
        touch=2.1,
        group=4.0,
        packs_groups=scale < 1.0,
        spill_low=0.2,
        spill_high=0.9,
        spilled_per_key=0.011,
        traffic=0.0001 * scale,
        offset=0.0015 * scale,
        sharpness=3.3,
        sms=4.0,
    )


def arrivals_of(specs: list[reference.RequestSpec], trace_block_tokens: int) -> Arrivals:
    ids = [spec.block_ids or [] for spec in specs]
    return Arrivals(
        arrival_s=np.array([spec.arrival_s for spec in specs], np.float64),
        input_tokens=np.array([spec.input_tokens for spec in specs], np.int32),
        output_tokens=np.array([spec.output_tokens for spec in specs], np.int32),
        block_offsets=np.concatenate([[0], np.cumsum([len(each) for each in ids])]).astype(np.int64),
        block_ids=np.array([block for each in ids for block in each], np.uint32),
        trace_block_tokens=trace_block_tokens,
        named_tokens=np.array([_named_tokens(spec, trace_block_tokens) for spec in specs], np.int32),
        priority=np.array([spec.priority for spec in specs], np.int32),
    )


def _named_tokens(spec: reference.RequestSpec, trace_block_tokens: int) -> int:
    """What `RequestSpec.named_tokens` = None stands for."""
    if spec.named_tokens is not None:
        return spec.named_tokens
    whole = spec.input_tokens // trace_block_tokens
    return spec.input_tokens if len(spec.block_ids or []) > whole else whole * trace_block_tokens


def drafting_of(config: reference.ReferenceConfig, requests: int) -> Drafting | None:
    if not config.k:
        return None
    return Drafting(
        conditional=np.array([config.conditional_acceptance, *config.other_profiles]),
        profile=np.arange(requests) % (1 + len(config.other_profiles)),
        widths=config.widths,
        lookahead=config.lookahead_tokens,
        slots=config.slots,
        policy=config.drafts_by,
        k_by_batch=config.k_by_batch,
        tiers=config.tiers,
        first_tier=config.first_tier,
        hit_after_hit=config.hit_after_hit,
        hit_after_miss=config.hit_after_miss,
        match_tokens=config.match_tokens,
    )


def engine_config_of(config: reference.ReferenceConfig, requests: int) -> EngineConfig:
    return EngineConfig(
        replicas=config.replicas,
        block_tokens=config.block_tokens,
        pool_blocks=config.pool_blocks,
        max_batched_tokens=config.max_batched_tokens,
        max_sequences=config.max_sequences,
        max_model_len=config.max_model_len,
        prefix_caching=config.prefix_caching,
        drop_last_hit_block=config.drop_last_hit_block,
        reserve_full_isl=config.reserve_full_isl,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        hit_alignment_tokens=config.hit_alignment_blocks * config.block_tokens,
        visible=config.visible,
        cache_decode_blocks=config.cache_decode_blocks,
        unhashed_last=config.unhashed_last,
        policy=config.policy,
        priority_tokens=config.priority_blocks * config.block_tokens,
        ttl_s=config.ttl_s,
        merge_duplicates=config.merge_duplicates,
        scheduling=config.scheduling,
        lpm_most_waiting=config.lpm_most_waiting,
        lpm_shared_tokens=config.lpm_shared_tokens,
        drafting=drafting_of(config, requests),
        seed=config.seed,
        interval_s=config.interval_s,
    )


def run_both(
    specs: list[reference.RequestSpec], config: reference.ReferenceConfig
) -> tuple[ReplayResult, reference.ReferenceResult]:
    cost = some_cost()
    fast = replay(
        arrivals_of(specs, config.trace_block_tokens), engine_config_of(config, len(specs)), cost, keep_pools=True
    )
    slow = reference.replay(specs, config, lambda *features: step_components(cost, *features))
    return fast, slow


_INTEGERS = (
    "hit_tokens",
    "rehit_tokens",
    "recomputed_tokens",
    "preemptions",
    "chunk_steps",
    "emitting_steps",
    "spec_steps",
    "draft_tokens",
    "accepted_tokens",
    "trimmed_tokens",
)
_TIMES = ("scheduled_s", "first_token_s", "finish_s", "first_output_s")


def assert_equal(fast: ReplayResult, slow: reference.ReferenceResult) -> None:
    """Integers exactly, times to 1e-9."""
    for row, request in enumerate(slow.requests):
        where = f"request {row}"
        assert bool(fast.refused[row]) == (request.status == "refused"), where
        assert fast.replica[row] == request.replica, where
        if request.status == "refused":
            assert fast.requests.emitted[row] == 0, where
            continue
        assert fast.requests.emitted[row] == request.emitted, where
        for name in _INTEGERS:
            assert getattr(fast.requests, name)[row] == getattr(request, name), f"{where}: {name}"
        for name in _TIMES:
            assert abs(getattr(fast.requests, name)[row] - getattr(request, name)) <= 1e-9, f"{where}: {name}"
        for name in ("decode_target_s", "decode_draft_s"):
            assert abs(getattr(fast.requests, name)[row] - getattr(request, name)) <= 1e-9, f"{where}: {name}"
        for name in ("itl_max_s", "itl_p99_s"):
            gap, expected = getattr(fast.requests, name)[row], getattr(request, name)
            assert np.isnan(gap) if expected is None else abs(gap - expected) <= 1e-9, f"{where}: {name}"
    for index, replica in enumerate(slow.replicas):
        assert fast.steps[index] == replica.steps
        timeline = fast.timelines[index]
        for interval in range(timeline.counters.shape[0]):
            expected = replica.timeline.get(interval, {})
            for column, name in enumerate(TIMELINE_COUNTERS):
                assert timeline.counters[interval, column] == expected.get(name, 0), (interval, name)
            for column, name in enumerate(TIMELINE_INTEGRALS):
                assert abs(timeline.integrals[interval, column] - expected.get(name, 0)) <= 1e-7, (interval, name)
            for column, name in enumerate(COMPONENTS):
                assert abs(timeline.components[interval, column] - expected.get(f"{name}_s", 0)) <= 1e-9, (
                    interval,
                    name,
                )
        assert max(replica.timeline, default=0) < timeline.counters.shape[0]


def check_pool(pool: Pool) -> None:
    """The compiled pool holds together: every segment is listed once, counts add up, the queue holds what nobody holds."""
    totals, segments = pool.totals, pool.segments
    live = []
    for key in range(pool.ids.shape[0]):
        segment, before = pool.ids[key, FIRST_COPY], NONE
        covered = []
        while segment != NONE:
            assert segments[segment, ID_PREVIOUS] == before
            assert segments[segment, ID] == key
            assert segments[segment, BLOCKS] > 0
            assert segments[segment, REFS] >= 0
            covered += range(segments[segment, START], segments[segment, START] + segments[segment, BLOCKS])
            live.append(int(segment))
            before, segment = segment, segments[segment, ID_NEXT]
        assert pool.ids[key, LAST_COPY] == before
        assert not totals[MERGE_DUPLICATES] or len(set(covered)) == len(covered), "a copy that should have been merged"
    assert len(set(live)) == len(live)
    queued = _linked(pool) if totals[POLICY] == LRU else _heaped(pool)
    assert all(segments[each, REFS] == 0 for each in queued)
    unhashed = [each for each in queued if segments[each, ID] == NONE]
    hashed = [each for each in queued if segments[each, ID] != NONE]
    assert sorted(hashed) == sorted(each for each in live if segments[each, REFS] == 0)
    assert sum(int(segments[each, BLOCKS]) for each in hashed) == totals[CACHED]
    assert sum(int(segments[each, BLOCKS]) for each in unhashed) == totals[UNHASHED]
    held = totals[CAPACITY] - totals[CACHED] - totals[BLANK] - totals[UNHASHED]
    assert held >= 0
    unregistered = int((pool.served[:, HAS_BLOCKS] - pool.served[:, HAS_REGISTERED]).sum())
    assert held == sum(int(segments[each, BLOCKS]) for each in live if segments[each, REFS] > 0) + unregistered


def _linked(pool: Pool) -> list[int]:
    """The free queue from its head, links checked."""
    queued = []
    segment, before = pool.totals[QUEUE_HEAD], NONE
    while segment != NONE:
        assert pool.segments[segment, PREVIOUS] == before
        queued.append(int(segment))
        before, segment = segment, pool.segments[segment, NEXT]
    return queued


def _heaped(pool: Pool) -> list[int]:
    """The free queue as a heap, its order checked."""
    queued = [int(each) for each in pool.heap[: pool.totals[HEAP_SIZE]]]
    keys = [int(pool.order[each, KEY]) for each in queued]
    for place, segment in enumerate(queued):
        assert pool.segments[segment, PREVIOUS] == place
        assert place == 0 or keys[(place - 1) // 2] < keys[place]
    return queued
