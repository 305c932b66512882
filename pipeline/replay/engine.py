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
from pipeline.replay.loop import DONE, NOW, STEPS_DONE, TIMELINE_FULL, new_progress, run_replica
from pipeline.replay.pool import blank_again, new_pool
from pipeline.replay.router import ROUTERS
from pipeline.replay.scheduler import (
    VISIBLE_FINISH,
    VISIBLE_SCHEDULED,
    VISIBLE_STEP,
    Requests,
    Settings,
    new_queues,
)
from pipeline.replay.segments import CACHED, Pool
from pipeline.replay.timeline import Timeline, add_state, longer, new_timeline, usable
from schemas.errors import StudyError

VISIBLE = {"scheduled": VISIBLE_SCHEDULED, "step": VISIBLE_STEP, "finish": VISIBLE_FINISH}


@dataclass(frozen=True)
class Arrivals:
    """What is replayed: n requests, by arrival. Lengths in tokens. Writable arrays, so that one compiled loop serves all."""

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    block_offsets: NDArray[np.int64]  # [n + 1] into block_ids
    block_ids: NDArray[np.uint32]
    trace_block_tokens: int | None  # null = no identity known


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
    acceptance: tuple[float, ...] = ()  # conditional, one per draft token; () = no speculation
    seed: int = 1
    interval_s: float = 10.0
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


def replay(arrivals: Arrivals, config: EngineConfig, cost: LoweredCost, *, keep_pools: bool = False) -> ReplayResult:
    """Replay `arrivals` on `config.replicas` engines. Same inputs, same result, bit for bit.

    Raises StudyError where the pool's blocks can't be mapped onto the trace's.
    """
    n = arrivals.arrival_s.shape[0]
    refused = arrivals.input_tokens >= config.max_model_len
    output = np.minimum(arrivals.output_tokens, config.max_model_len - arrivals.input_tokens).astype(np.int32)
    replica = ROUTERS[config.router](n, config.replicas)
    chains = _chains(arrivals, config)
    requests = _requests(arrivals, output)
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
        unhashed_last=config.unhashed_last and config.prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        draft_tokens=len(config.acceptance),
        lookahead_tokens=len(config.acceptance),
        reserve_full_isl=config.reserve_full_isl,
        seed=np.uint64(config.seed),
        acceptance=np.array(config.acceptance, dtype=np.float64),
        interval_s=config.interval_s,
    )
    kept = ~refused
    lengths = (arrivals.input_tokens.astype(np.int64) + output + len(config.acceptance))[kept]
    longest = int(-(-lengths.max(initial=1) // config.block_tokens)) + 1
    holds = min(config.max_sequences, n) * longest + 1
    ids = chains.private_id + n
    span = float(arrivals.arrival_s[-1]) if n else 0.0
    intervals = int(span / config.interval_s) + 2
    timelines, steps, pools, ends = [], [], [], []
    by_replica = np.argsort(replica[kept], kind="stable")  # requests stay in order of arrival
    rows = np.flatnonzero(kept)[by_replica].astype(np.int32)
    bounds = np.searchsorted(replica[rows], np.arange(config.replicas + 1))
    pool = new_pool(config.pool_blocks, ids, n, holds, longest)
    for index in range(config.replicas):
        mine = rows[bounds[index] : bounds[index + 1]]
        queues = new_queues(mine.shape[0], config.max_sequences)
        timeline = new_timeline(intervals)
        progress = new_progress()
        while (
            end := run_replica(settings, cost, pool, chains, requests, queues, timeline, progress, mine)
        ) == TIMELINE_FULL:
            timeline = longer(timeline)
        if end != DONE:
            raise AssertionError(f"replica {index} had requests and scheduled none of them")
        timelines.append(timeline)
        steps.append(int(progress.counts[STEPS_DONE]))
        ends.append((float(progress.clock[NOW]), int(pool.totals[CACHED])))
        if keep_pools:
            pools.append(pool)
            pool = new_pool(config.pool_blocks, ids, n, holds, longest)
        else:
            blank_again(pool, chains, mine)
    timelines = _idle_to_the_end(timelines, ends, config.interval_s)
    return ReplayResult(requests, refused, replica, tuple(timelines), np.array(steps), tuple(pools))


def _idle_to_the_end(timelines: list[Timeline], ends: list[tuple[float, int]], interval_s: float) -> list[Timeline]:
    """A replica that is done before the others keeps its cached blocks until the fleet's last event."""
    last = max(end for end, _ in ends)
    filled = []
    for timeline, (end, cached) in zip(timelines, ends, strict=True):
        while int(last / interval_s) >= usable(timeline):
            timeline = longer(timeline)
        add_state(timeline, end, last, interval_s, 0, 0, 0, cached)
        filled.append(timeline)
    return filled


def _chains(arrivals: Arrivals, config: EngineConfig) -> Chains:
    """How each request's pool blocks map onto the trace's block ids."""
    n = arrivals.arrival_s.shape[0]
    trace_block = arrivals.trace_block_tokens
    if not config.prefix_caching or trace_block is None:
        nothing = np.zeros(n, np.int32)
        return Chains(np.zeros(1, np.uint32), np.zeros(n + 1, np.int64), nothing, nothing, 1, 0)
    if trace_block % config.block_tokens:
        raise StudyError(
            f"block_tokens = {config.block_tokens} does not divide the trace's blocks of {trace_block} tokens",
            mend="the trace can't tell what such blocks hold; use a divisor",
        )
    per_id = trace_block // config.block_tokens
    named_ids = np.diff(arrivals.block_offsets)
    whole = arrivals.input_tokens // trace_block
    full = np.where(named_ids >= whole, whole, 0)  # a request without ids has no identity
    names_partial = (named_ids > whole) & (full == whole)
    named = np.where(names_partial, arrivals.input_tokens // config.block_tokens, full * per_id)
    return Chains(
        block_ids=arrivals.block_ids if arrivals.block_ids.size else np.zeros(1, np.uint32),
        offsets=arrivals.block_offsets,
        full_blocks=(full * per_id).astype(np.int32),
        named_blocks=named.astype(np.int32),
        blocks_per_id=per_id,
        private_id=int(arrivals.block_ids.max(initial=0)) + 1,
    )


def _requests(arrivals: Arrivals, output: NDArray[np.int32]) -> Requests:
    n = arrivals.arrival_s.shape[0]

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
        has_drafts=np.zeros(n, np.bool_),
        lost=count(),
        target_mark=np.zeros(n),
        draft_mark=np.zeros(n),
        scheduled_s=unknown(),
        first_token_s=unknown(),
        finish_s=unknown(),
        first_output_s=unknown(),
        decode_draft_s=np.zeros(n),
        decode_target_s=np.zeros(n),
        hit_tokens=count(),
        recomputed_tokens=count(),
        preemptions=count(),
        emitting_steps=count(),
        spec_steps=count(),
        draft_tokens=count(),
        accepted_tokens=count(),
        trimmed_tokens=count(),
    )
