"""The replay of one scenario: prepares the arrays, runs every replica, hands back what happened as arrays.

`replay` knows no study and no file: `pipeline/scenario.py` resolves a scenario into its arguments and turns its result into
tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.lowered import LoweredCost
from pipeline.replay.chains import Chains
from pipeline.replay.loop import DONE, LOG_FULL, NOW, STEPS_DONE, TIMELINE_FULL, new_progress, run_replica
from pipeline.replay.pool import PoolRules, blank_again, new_pool
from pipeline.replay.router import ROUTERS
from pipeline.replay.scheduler import (
    VISIBLE_FINISH,
    VISIBLE_SCHEDULED,
    VISIBLE_STEP,
    Requests,
    Settings,
    new_running,
)
from pipeline.replay.segments import BLOCKS, CACHED, FIFO, ID, LFU, LRU, NONE, PREFIX_PRIORITY, SEGMENT_NEXT, Pool
from pipeline.replay.speculation import ADAPTIVE, Drafting, Proposals, proposals_of
from pipeline.replay.steps import StepLog, inter_token_latencies, longer_log, new_step_log
from pipeline.replay.timeline import EXPIRED_BLOCKS, Timeline, add_state, longer, new_timeline, usable
from pipeline.replay.waiting import (
    FCFS,
    LONGEST_PREFIX,
    LPM_MOST_WAITING,
    LPM_SHARED_TOKENS,
    PRIORITY,
    new_waiting,
)
from schemas.errors import StudyError

VISIBLE = {"scheduled": VISIBLE_SCHEDULED, "step": VISIBLE_STEP, "finish": VISIBLE_FINISH}
POLICIES = {"lru": LRU, "fifo": FIFO, "lfu": LFU, "prefix_priority": PREFIX_PRIORITY}
SCHEDULING = {"fcfs": FCFS, "priority": PRIORITY, "longest_prefix": LONGEST_PREFIX}


@dataclass(frozen=True)
class Arrivals:
    """What is replayed: n requests, by arrival. Lengths in tokens. Writable arrays, so that one compiled loop serves all."""

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    block_offsets: NDArray[np.int64]  # [n + 1] into block_ids
    block_ids: NDArray[np.uint32]
    trace_block_tokens: int | None  # null = no identity known
    named_tokens: NDArray[np.int32] | None = (
        None  # [n] first tokens that the ids name; null = as far as the prompt's ids go
    )
    priority: NDArray[np.int32] | None = None  # [n] for scheduling = "priority", the smallest first; null = all equal


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine and how many of it; see docs/replay.md for every term."""

    replicas: int
    block_tokens: int
    pool_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool = False
    drop_last_hit_block: bool = False
    reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    hit_alignment_tokens: int = 0  # 0 = block_tokens
    visible: str = "scheduled"  # VISIBLE
    cache_decode_blocks: bool = True
    unhashed_last: bool = False
    policy: str = "lru"  # POLICIES
    priority_tokens: int = 0  # with prefix_priority
    ttl_s: float | None = None  # with lru or fifo; null = for ever
    merge_duplicates: bool = False
    scheduling: str = "fcfs"  # SCHEDULING
    lpm_most_waiting: int = LPM_MOST_WAITING
    lpm_shared_tokens: int = LPM_SHARED_TOKENS
    drafting: Drafting | None = None  # null = no speculation
    seed: int = 1
    interval_s: float = 10.0
    itl: bool = True  # inter-token latencies per request
    keep_steps: bool = False  # what every step computed
    router: str = "round_robin"


@dataclass(frozen=True)
class ReplayResult:
    """Arrays of n, rows of the trace. `requests` holds times and counts; refused ones have NaN times."""

    requests: Requests
    refused: NDArray[np.bool_]
    replica: NDArray[np.int32]
    timelines: tuple[Timeline, ...]  # per replica
    steps: NDArray[np.int64]  # per replica
    pools: tuple[Pool, ...]  # as they were at the end, for integrity checks; empty unless asked for
    schedules: tuple[Schedule, ...] = ()  # per replica; empty unless `keep_steps`


@dataclass(frozen=True)
class Schedule:
    """What a replica did, step by step: the cost model's argument."""

    features: NDArray[np.float64]  # [steps, STEP_FEATURES]
    start_s: NDArray[np.float64]  # [steps]
    end_s: NDArray[np.float64]  # [steps]
    left: NDArray[np.bool_]  # [steps] whether work was left for later


def replay(arrivals: Arrivals, config: EngineConfig, cost: LoweredCost, *, keep_pools: bool = False) -> ReplayResult:
    """Replay `arrivals` on `config.replicas` engines. Same inputs, same result, bit for bit.

    Raises StudyError where the pool's blocks can't be mapped onto the trace's.
    """
    n = arrivals.arrival_s.shape[0]
    refused = arrivals.input_tokens >= config.max_model_len
    output = np.minimum(arrivals.output_tokens, config.max_model_len - arrivals.input_tokens).astype(np.int32)
    replica = ROUTERS[config.router](n, config.replicas)
    chains = _chains(arrivals, config)
    proposals = proposals_of(config.drafting, n, config.max_sequences, config.seed)
    requests = _requests(arrivals, output, proposals, config.drafting)
    drafts = lookahead = 0
    if config.drafting is not None:
        drafts = config.drafting.most
        lookahead = drafts if config.drafting.lookahead is None else config.drafting.lookahead
    settings = Settings(
        block_tokens=config.block_tokens,
        pool_blocks=config.pool_blocks,
        max_batched_tokens=config.max_batched_tokens,
        max_sequences=config.max_sequences,
        max_model_len=config.max_model_len,
        prefix_caching=config.prefix_caching,
        drop_last_hit_block=config.drop_last_hit_block,
        hit_alignment_blocks=max(1, config.hit_alignment_tokens // config.block_tokens),
        visible=VISIBLE[config.visible],
        cache_decode_blocks=config.cache_decode_blocks,
        ttl_s=np.inf if config.ttl_s is None else config.ttl_s,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        draft_tokens=drafts,
        draft_slots=0 if config.drafting is None else config.drafting.slots,
        lookahead_tokens=lookahead,
        reserve_full_isl=config.reserve_full_isl,
        interval_s=config.interval_s,
    )
    kept = ~refused
    lengths = (arrivals.input_tokens.astype(np.int64) + output + drafts + lookahead)[kept]
    longest = int(-(-lengths.max(initial=1) // config.block_tokens)) + 1
    holds = min(config.max_sequences, n) * longest + 1
    ids = chains.private_id + n
    span = float(arrivals.arrival_s[-1]) if n else 0.0
    intervals = int(span / config.interval_s) + 2
    timelines, steps, pools, ends, schedules = [], [], [], [], []
    by_replica = np.argsort(replica[kept], kind="stable")  # requests stay in order of arrival
    rows = np.flatnonzero(kept)[by_replica].astype(np.int32)
    bounds = np.searchsorted(replica[rows], np.arange(config.replicas + 1))
    rules = PoolRules(
        policy=POLICIES[config.policy],
        priority_blocks=config.priority_tokens // config.block_tokens,
        unhashed_last=config.unhashed_last and config.prefix_caching,
        merge_duplicates=config.merge_duplicates,
        has_ttl=config.ttl_s is not None,
    )
    waiting = new_waiting(
        n, SCHEDULING[config.scheduling], arrivals.priority, ids, config.lpm_most_waiting, config.lpm_shared_tokens
    )
    running = new_running(n, config.max_sequences)
    pool = new_pool(config.pool_blocks, ids, n, holds, longest, rules)
    log = new_step_log(1024, 1024, features=config.keep_steps)
    for index in range(config.replicas):
        mine = rows[bounds[index] : bounds[index + 1]]
        timeline = new_timeline(intervals)
        progress = new_progress()
        log.totals[0] = 0
        while True:
            end = run_replica(
                settings, proposals, cost, pool, chains, requests, waiting, running, log, timeline, progress, mine
            )
            if end == TIMELINE_FULL:
                timeline = longer(timeline)
            elif end == LOG_FULL:
                log = longer_log(log, 2 * running.requests.shape[0])
            else:
                break
        if end != DONE:
            raise AssertionError(f"replica {index} had requests and scheduled none of them")
        if config.itl:
            inter_token_latencies(
                log,
                int(progress.counts[STEPS_DONE]),
                mine,
                requests.first_step,
                requests.emitting_steps,
                requests.silent_steps,
                requests.itl_max_s,
                requests.itl_p99_s,
            )
        if config.keep_steps:
            schedules.append(_schedule(log, int(progress.counts[STEPS_DONE])))
        timelines.append(timeline)
        steps.append(int(progress.counts[STEPS_DONE]))
        ends.append(_End(float(progress.clock[NOW]), int(pool.totals[CACHED]), *_drops(pool, settings.ttl_s)))
        if keep_pools:
            pools.append(pool)
            pool = new_pool(config.pool_blocks, ids, n, holds, longest, rules)
        else:
            blank_again(pool, chains, mine)
    timelines = _idle_to_the_end(timelines, ends, config.interval_s)
    return ReplayResult(requests, refused, replica, tuple(timelines), np.array(steps), tuple(pools), tuple(schedules))


@dataclass(frozen=True)
class _End:
    """A replica after its last request: when, what it has cached, and when these blocks' time to live ends."""

    time_s: float
    cached_blocks: int
    drops_s: NDArray[np.float64]  # ascending
    dropped_blocks: NDArray[np.int64]


def _schedule(log: StepLog, steps: int) -> Schedule:
    """A copy: the log is used again."""
    return Schedule(
        log.features[:steps].copy(), log.start_s[:steps].copy(), log.end_s[:steps].copy(), log.left[:steps].copy()
    )


def _drops(pool: Pool, ttl_s: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """When cached blocks that nobody holds will be dropped, and how many each time."""
    if ttl_s == np.inf:
        return np.empty(0), np.empty(0, np.int64)
    made = int(pool.totals[SEGMENT_NEXT])
    count = pool.segments[:made, BLOCKS]
    free = (pool.segments[:made, ID] != NONE) & (count > 0)
    times, place = np.unique(pool.stamps[:made][free] + ttl_s, return_inverse=True)
    blocks = np.bincount(place, weights=count[free], minlength=times.shape[0]).astype(np.int64)
    return times, blocks


def _idle_to_the_end(timelines: list[Timeline], ends: list[_End], interval_s: float) -> list[Timeline]:
    """A replica that is done before the others keeps its cached blocks until the fleet's last event, or their time to live."""
    last = max(end.time_s for end in ends)
    filled = []
    for timeline, end in zip(timelines, ends, strict=True):
        while int(last / interval_s) >= usable(timeline):
            timeline = longer(timeline)
        now, cached = end.time_s, end.cached_blocks
        for drop_s, blocks in zip(end.drops_s.tolist(), end.dropped_blocks.tolist(), strict=True):
            if drop_s >= last:
                break
            due = max(now, drop_s)
            add_state(timeline, now, due, interval_s, 0, 0, 0, cached)
            now, cached = due, cached - blocks
            timeline.counters[int(now / interval_s), EXPIRED_BLOCKS] += blocks
        add_state(timeline, now, last, interval_s, 0, 0, 0, cached)
        filled.append(timeline)
    return filled


def _chains(arrivals: Arrivals, config: EngineConfig) -> Chains:
    """How each request's pool blocks map onto the trace's block ids."""
    n = arrivals.arrival_s.shape[0]
    trace_block = arrivals.trace_block_tokens
    if not config.prefix_caching or trace_block is None:
        nothing = np.zeros(n, np.int32)
        return Chains(np.zeros(1, np.uint32), np.zeros(n + 1, np.int64), nothing, nothing, 1, 0)
    offsets, block_ids, block_tokens = arrivals.block_offsets, arrivals.block_ids, config.block_tokens
    named_ids = np.diff(offsets)
    prompt_blocks = arrivals.input_tokens // trace_block
    if arrivals.named_tokens is None:
        named_tokens = np.where(named_ids > prompt_blocks, arrivals.input_tokens, prompt_blocks * trace_block)
    else:
        named_tokens = arrivals.named_tokens
    named_tokens = np.where(named_ids >= named_tokens // trace_block, named_tokens, 0)  # without ids no identity
    if trace_block % block_tokens == 0:
        per_id = trace_block // block_tokens
        full = named_tokens // trace_block * per_id
        named = np.where(named_ids > named_tokens // trace_block, named_tokens // block_tokens, full)
    elif block_tokens % trace_block == 0:
        per_id = 1
        full = named = named_tokens // block_tokens
        block_ids, offsets = _every(block_ids, offsets, block_tokens // trace_block, full)
    else:
        raise StudyError(
            f"block_tokens = {block_tokens} neither divides the trace's blocks of {trace_block} tokens nor is a multiple",
            mend="the trace can't tell what such blocks hold; use a divisor or a multiple",
        )
    return Chains(
        block_ids=block_ids if block_ids.size else np.zeros(1, np.uint32),
        offsets=offsets,
        full_blocks=full.astype(np.int32),
        named_blocks=named.astype(np.int32),
        blocks_per_id=per_id,
        private_id=int(block_ids.max(initial=0)) + 1,
    )


def _every(
    block_ids: NDArray[np.uint32], offsets: NDArray[np.int64], step: int, blocks: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Of each request's ids, number step - 1, 2 step - 1, ...: `blocks` of them. (ids, offsets)"""
    coarse = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    place = np.arange(coarse[-1]) - np.repeat(coarse[:-1], blocks)
    return block_ids[np.repeat(offsets[:-1], blocks) + (place + 1) * step - 1], coarse


def _requests(
    arrivals: Arrivals, output: NDArray[np.int32], proposals: Proposals, drafting: Drafting | None
) -> Requests:
    n = arrivals.arrival_s.shape[0]
    adapting = n if proposals.policy == ADAPTIVE else 0

    def count() -> NDArray[np.int32]:
        return np.zeros(n, np.int32)

    def unknown() -> NDArray[np.float64]:
        return np.full(n, np.nan)

    return Requests(
        arrival_s=arrivals.arrival_s,
        input_tokens=arrivals.input_tokens,
        output_tokens=output,
        computed=count(),
        emitted=count(),
        drafts=count(),
        matched=np.full(n, -1, np.int8),
        tier=np.full(adapting, 0 if drafting is None else drafting.first_tier, np.int32),
        smoothed=np.zeros(adapting),
        lost=count(),
        first_step=count(),
        silent_steps=count(),
        silent_from=count(),
        target_mark=np.zeros(n),
        draft_mark=np.zeros(n),
        scheduled_s=unknown(),
        first_token_s=unknown(),
        finish_s=unknown(),
        first_output_s=unknown(),
        decode_draft_s=np.zeros(n),
        decode_target_s=np.zeros(n),
        hit_tokens=count(),
        rehit_tokens=count(),
        recomputed_tokens=count(),
        preemptions=count(),
        chunk_steps=count(),
        emitting_steps=count(),
        itl_max_s=unknown(),
        itl_p99_s=unknown(),
        spec_steps=count(),
        draft_tokens=count(),
        accepted_tokens=count(),
        trimmed_tokens=count(),
    )
