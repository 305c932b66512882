"""The loop of one replica: arrivals, schedule, run, commit, until every request is done. See docs/replay.md."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.lowered import LoweredCost, step_components
from pipeline.jit import inlined, njit
from pipeline.replay.chains import Chains
from pipeline.replay.eviction import drop_first, next_expiry
from pipeline.replay.pool import free_blocks, release
from pipeline.replay.scheduler import (
    RUNNING_COUNT,
    SCHEDULED,
    VISIBLE_FINISH,
    VISIBLE_STEP,
    Requests,
    Running,
    Settings,
    register_final,
    schedule,
)
from pipeline.replay.segments import CACHED, CAPACITY, EVICTED, EVICTED_DECODE, EXPIRED, Pool
from pipeline.replay.speculation import (
    ADAPTIVE,
    GOODPUT,
    SMOOTHING,
    Proposals,
    accepted_levels,
    best_drafts,
    drafted,
    next_tier,
)
from pipeline.replay.steps import StepLog, note_silent
from pipeline.replay.timeline import (
    ACCEPTED_TOKENS,
    ARRIVALS,
    CACHED_FREE,
    DECODE_TOKENS,
    DRAFT_TOKENS,
    EMITTED_TOKENS,
    EVICTED_BLOCKS,
    EVICTED_DECODE_BLOCKS,
    EXPIRED_BLOCKS,
    FINISHED,
    HIT_TOKENS,
    PREEMPTIONS,
    PREFILL_TOKENS,
    REHIT_TOKENS,
    RUNNING,
    STEPS,
    USED,
    WAITING,
    Timeline,
    add_state,
    usable,
)
from pipeline.replay.waiting import COUNT, Waiting, push_waiting

DONE, STUCK, TIMELINE_FULL, LOG_FULL = 0, 1, 2, 3
"""How a replica's loop ended. STUCK: a step in which nothing could be scheduled, a fault of the program."""

NOW, TARGET_SUM, DRAFT_SUM = range(3)
ARRIVED, STEPS_DONE, DUE_WAITING, DUE_RUNNING, DUE_USED, DUE_CACHED = range(6)
DUE_FROM, DUE_TO = range(2)


class Progress(NamedTuple):
    """Where a replica's loop stands between two calls."""

    clock: NDArray[np.float64]  # [3] NOW; running sums of target and draft seconds over all steps
    counts: NDArray[np.int64]  # [6] requests arrived; steps taken; the state of a step that is not booked yet
    due: NDArray[np.float64]  # [2] from when to when that state lasted


def new_progress() -> Progress:
    """The beginning of time."""
    return Progress(np.zeros(3, np.float64), np.zeros(6, np.int64), np.zeros(2, np.float64))


@njit
def drafts_of_step(
    settings: Settings,
    cost: LoweredCost,
    proposals: Proposals,
    requests: Requests,
    running: Running,
    rows: int,
    context: float,
) -> int:
    """How many tokens are drafted per row at the step's end, for the next step: the most of all rows with ADAPTIVE."""
    if proposals.policy == GOODPUT:
        return best_drafts(cost, proposals, rows, context, settings.max_batched_tokens)
    if proposals.policy == ADAPTIVE:
        most = 0
        for place in range(rows):
            most = max(most, requests.tier[running.requests[place]])
        return most
    return int(proposals.k_of_batch[rows])


@njit
def verify(proposals: Proposals, requests: Requests, request: int, drafts: int) -> int:
    """How many of a row's drafts are accepted. Mutates the request's counts."""
    accepted = accepted_levels(proposals, request, requests.emitted[request], proposals.depth_of[drafts])
    requests.spec_steps[request] += 1
    requests.draft_tokens[request] += drafts
    requests.accepted_tokens[request] += accepted
    return accepted


@njit
def draft(proposals: Proposals, requests: Requests, request: int, most: int, drafts: int, accepted: int) -> None:
    """Draft for a request's next step; `drafts` and `accepted` were this step's. Mutates."""
    if proposals.policy == ADAPTIVE:
        most = requests.tier[request]  # as of before this step: the tiers' passes are part of it
        if drafts > 0:
            steps = requests.spec_steps[request]
            before = requests.smoothed[request] if steps > 1 else float(accepted)
            requests.smoothed[request] = before + SMOOTHING * (accepted - before)
            requests.tier[request] = next_tier(proposals, most, requests.smoothed[request], steps)
    count = 0
    if most > 0:
        count = drafted(proposals, request, requests.emitted[request], most, requests.matched[request])
        requests.matched[request] = 1 if count > 0 else 0
    requests.drafts[request] = count


@inlined
def commit(
    settings: Settings,
    proposals: Proposals,
    next_drafts: int,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    running: Running,
    log: StepLog,
    step: int,
    now_s: float,
    first_output_s: float,
    target_sum: float,
    draft_sum: float,
) -> tuple[int, int, int]:
    """The end of a step: emit tokens, finish requests. Mutates; returns (tokens emitted, drafts accepted, requests finished)."""
    emitted_tokens = accepted_tokens = 0
    finished = 0
    kept = 0
    scheduled = running.counts[SCHEDULED]
    register_step = settings.prefix_caching and settings.visible == VISIBLE_STEP
    register_finish = settings.prefix_caching and settings.visible == VISIBLE_FINISH
    for place in range(running.counts[RUNNING_COUNT]):
        request = running.requests[place]
        if place < scheduled:
            tokens = running.tokens[place]
            before = requests.emitted[request]
            computed = requests.computed[request] + tokens
            if computed >= requests.input_tokens[request] + before:
                drafts = running.drafts[place]
                accepted = 0
                if drafts > 0:
                    accepted = verify(proposals, requests, request, drafts)
                    accepted_tokens += accepted
                    computed -= drafts - accepted
                remaining = requests.output_tokens[request] - before
                emitted = accepted + 1
                if emitted > remaining:
                    requests.trimmed_tokens[request] += emitted - remaining
                    emitted = remaining
                requests.emitted[request] = before + emitted
                emitted_tokens += emitted
                if before == 0:
                    requests.first_token_s[request] = now_s
                    requests.first_output_s[request] = first_output_s
                    requests.first_step[request] = step
                    requests.target_mark[request] = target_sum
                    requests.draft_mark[request] = draft_sum
                requests.computed[request] = computed
                if emitted == remaining:
                    requests.finish_s[request] = now_s
                    silent = requests.silent_steps[request]
                    requests.emitting_steps[request] = step - requests.first_step[request] + 1 - silent
                    requests.decode_target_s[request] += target_sum - requests.target_mark[request]
                    requests.decode_draft_s[request] += draft_sum - requests.draft_mark[request]
                    if register_step or register_finish:
                        final = min(computed, requests.input_tokens[request] + before + emitted)
                        register_final(settings, pool, chains, requests, request, final, now_s)
                    release(pool, request, now_s)
                    finished += 1
                    continue
                if settings.draft_tokens > 0:
                    draft(proposals, requests, request, next_drafts, drafts, accepted)
            else:
                requests.computed[request] = computed
                requests.chunk_steps[request] += 1
                if before > 0:
                    requests.silent_steps[request] += 1
                    note_silent(log, request, step, step)
            if register_step:
                register_final(settings, pool, chains, requests, request, computed, now_s)
        elif requests.emitted[request] > 0:  # the budget did not reach it
            requests.silent_steps[request] += 1
            note_silent(log, request, step, step)
        running.requests[kept] = request
        kept += 1
    running.counts[RUNNING_COUNT] = kept
    return emitted_tokens, accepted_tokens, finished


@njit
def drop_expired(settings: Settings, pool: Pool, timeline: Timeline, now_s: float) -> None:
    """Before a step: blocks whose time to live has ended are dropped. Mutates."""
    before = pool.totals[EXPIRED]
    while next_expiry(pool, settings.ttl_s) < now_s:
        drop_first(pool)
    timeline.counters[int(now_s / settings.interval_s), EXPIRED_BLOCKS] += pool.totals[EXPIRED] - before


@njit
def idle(settings: Settings, pool: Pool, timeline: Timeline, now_s: float, until_s: float) -> None:
    """Nobody is there from now until then; cached blocks stay, or go as their time to live ends. Mutates."""
    if settings.ttl_s < np.inf:
        while next_expiry(pool, settings.ttl_s) < until_s:
            due_s = max(now_s, next_expiry(pool, settings.ttl_s))
            add_state(timeline, now_s, due_s, settings.interval_s, 0, 0, 0, pool.totals[CACHED])
            now_s = due_s
            before = pool.totals[EXPIRED]
            drop_first(pool)
            timeline.counters[int(now_s / settings.interval_s), EXPIRED_BLOCKS] += pool.totals[EXPIRED] - before
    add_state(timeline, now_s, until_s, settings.interval_s, 0, 0, 0, pool.totals[CACHED])


@njit
def run_replica(
    settings: Settings,
    proposals: Proposals,
    cost: LoweredCost,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    waiting: Waiting,
    running: Running,
    log: StepLog,
    timeline: Timeline,
    progress: Progress,
    mine: NDArray[np.int32],
) -> int:
    """Replay the requests `mine` (rows of the trace, by arrival) on one replica, from where `progress` stands.

    Returns DONE, STUCK, or TIMELINE_FULL or LOG_FULL: then call it again with a longer one. Mutates everything but settings,
    proposals, cost, chains and `mine`.
    """
    size = mine.shape[0]
    intervals = usable(timeline)
    if progress.due[DUE_TO] > progress.due[DUE_FROM]:
        if int(progress.due[DUE_TO] / settings.interval_s) >= intervals:
            return TIMELINE_FULL
        add_state(
            timeline,
            progress.due[DUE_FROM],
            progress.due[DUE_TO],
            settings.interval_s,
            progress.counts[DUE_WAITING],
            progress.counts[DUE_RUNNING],
            progress.counts[DUE_USED],
            progress.counts[DUE_CACHED],
        )
        progress.due[DUE_TO] = progress.due[DUE_FROM]
    now_s, target_sum, draft_sum = progress.clock[NOW], progress.clock[TARGET_SUM], progress.clock[DRAFT_SUM]
    arrived, steps = progress.counts[ARRIVED], progress.counts[STEPS_DONE]
    end = STUCK
    silences = 2 * running.requests.shape[0]  # at most so many are noted in a step
    while True:
        interval = int(now_s / settings.interval_s)
        if interval >= intervals:
            end = TIMELINE_FULL
            break
        if steps == log.end_s.shape[0] or log.totals[0] + silences > log.silent_request.shape[0]:
            end = LOG_FULL
            break
        while arrived < size and requests.arrival_s[mine[arrived]] <= now_s:
            timeline.counters[int(requests.arrival_s[mine[arrived]] / settings.interval_s), ARRIVALS] += 1
            push_waiting(waiting, mine[arrived])
            arrived += 1
        if running.counts[RUNNING_COUNT] == 0 and waiting.totals[COUNT] == 0:
            if arrived == size:
                end = DONE
                break
            next_s = requests.arrival_s[mine[arrived]]
            if int(next_s / settings.interval_s) >= intervals:
                end = TIMELINE_FULL
                break
            idle(settings, pool, timeline, now_s, next_s)
            now_s = next_s
            continue

        if settings.ttl_s < np.inf:
            drop_expired(settings, pool, timeline, now_s)
        evicted, evicted_decode = pool.totals[EVICTED], pool.totals[EVICTED_DECODE]
        batch = schedule(settings, pool, chains, requests, waiting, running, log, steps, now_s, target_sum, draft_sum)
        if batch.rows == 0:
            if batch.preemptions == 0:
                break
            # By priority the first to run was the first to be preempted: no step, and the others' turn at once.
            timeline.counters[interval, PREEMPTIONS] += batch.preemptions
            continue
        next_drafts = passes = 0
        if settings.draft_tokens > 0:
            context = float(batch.decode_context + batch.prefill_context)
            next_drafts = drafts_of_step(settings, cost, proposals, requests, running, batch.rows, context)
            passes = proposals.depth_of[next_drafts]
        gemm, prefill, decode, communication, sampling, drafting, overhead = step_components(
            cost,
            batch.sampled,
            batch.decode_rows,
            batch.decode_tokens,
            float(batch.decode_context),
            float(batch.decode_longest),
            batch.prefill_rows,
            batch.prefill_tokens,
            float(batch.prefill_context),
            batch.prefill_tiles,
            float(batch.prefill_units),
            float(batch.prefill_longest),
            batch.tiles_most,
            passes,
        )
        duration = gemm + prefill + decode + communication + sampling + drafting + overhead
        queued, admitted = waiting.totals[COUNT], running.counts[RUNNING_COUNT]
        used, cached = pool.totals[CAPACITY] - free_blocks(pool), pool.totals[CACHED]
        reached = int((now_s + duration) / settings.interval_s)
        if reached == interval:
            timeline.integrals[interval, WAITING] += queued * duration
            timeline.integrals[interval, RUNNING] += admitted * duration
            timeline.integrals[interval, USED] += used * duration
            timeline.integrals[interval, CACHED_FREE] += cached * duration
        elif reached < intervals:
            add_state(timeline, now_s, now_s + duration, settings.interval_s, queued, admitted, used, cached)
        else:  # the step is finished first; its state is booked when the timeline is longer
            progress.due[DUE_FROM], progress.due[DUE_TO] = now_s, now_s + duration
            progress.counts[DUE_WAITING], progress.counts[DUE_RUNNING] = queued, admitted
            progress.counts[DUE_USED], progress.counts[DUE_CACHED] = used, cached
        timeline.components[interval, 0] += gemm
        timeline.components[interval, 1] += prefill
        timeline.components[interval, 2] += decode
        timeline.components[interval, 3] += communication
        timeline.components[interval, 4] += sampling
        timeline.components[interval, 5] += drafting
        timeline.components[interval, 6] += overhead
        started_s = now_s
        now_s += duration
        target_sum += gemm + prefill + decode + communication
        draft_sum += drafting
        emitted, accepted, finished = commit(
            settings,
            proposals,
            next_drafts,
            pool,
            chains,
            requests,
            running,
            log,
            steps,
            now_s,
            sampling + drafting,
            target_sum,
            draft_sum,
        )
        log.end_s[steps] = now_s
        if log.start_s.shape[0] > 0:
            log.start_s[steps] = started_s
            taken = batch.decode_tokens + batch.prefill_tokens + batch.rows * settings.draft_slots
            spent = taken >= settings.max_batched_tokens - settings.draft_slots
            log.left[steps] = queued > 0 or spent
            step = log.features[steps]
            step[0], step[1], step[2] = batch.sampled, batch.decode_rows, batch.decode_tokens
            step[3], step[4] = batch.decode_context, batch.decode_longest
            step[5], step[6], step[7] = batch.prefill_rows, batch.prefill_tokens, batch.prefill_context
            step[8], step[9], step[10] = batch.prefill_tiles, batch.prefill_units, batch.prefill_longest
            step[11], step[12] = batch.tiles_most, passes
        steps += 1
        timeline.counters[interval, STEPS] += 1
        if finished > 0:
            timeline.counters[interval, FINISHED] += finished
        if batch.prefill_tokens > 0:
            timeline.counters[interval, PREFILL_TOKENS] += batch.prefill_tokens
        timeline.counters[interval, DECODE_TOKENS] += batch.decode_tokens
        timeline.counters[interval, EMITTED_TOKENS] += emitted
        # What most steps have none of.
        if batch.drafts > 0:
            timeline.counters[interval, DRAFT_TOKENS] += batch.drafts
            timeline.counters[interval, ACCEPTED_TOKENS] += accepted
        if batch.hit_tokens + batch.rehit_tokens > 0:
            timeline.counters[interval, HIT_TOKENS] += batch.hit_tokens
            timeline.counters[interval, REHIT_TOKENS] += batch.rehit_tokens
        if pool.totals[EVICTED] > evicted:
            timeline.counters[interval, EVICTED_BLOCKS] += pool.totals[EVICTED] - evicted
            timeline.counters[interval, EVICTED_DECODE_BLOCKS] += pool.totals[EVICTED_DECODE] - evicted_decode
        if batch.preemptions > 0:
            timeline.counters[interval, PREEMPTIONS] += batch.preemptions
        if reached >= intervals:
            end = TIMELINE_FULL
            break
    progress.clock[NOW], progress.clock[TARGET_SUM], progress.clock[DRAFT_SUM] = now_s, target_sum, draft_sum
    progress.counts[ARRIVED], progress.counts[STEPS_DONE] = arrived, steps
    return end
