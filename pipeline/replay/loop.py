"""The loop of one replica: arrivals, schedule, run, commit, until every request is done. See docs/replay.md."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.lowered import LoweredCost, step_components
from pipeline.jit import inlined, njit
from pipeline.replay.chains import Chains
from pipeline.replay.pool import free_blocks, release
from pipeline.replay.scheduler import (
    RUNNING_COUNT,
    SCHEDULED,
    VISIBLE_FINISH,
    VISIBLE_STEP,
    WAITING_COUNT,
    Queues,
    Requests,
    Settings,
    push_waiting,
    register_final,
    schedule,
)
from pipeline.replay.segments import CACHED, CAPACITY, EVICTED, Pool
from pipeline.replay.speculation import accepted_drafts
from pipeline.replay.timeline import (
    ARRIVALS,
    CACHED_FREE,
    DECODE_TOKENS,
    EMITTED_TOKENS,
    EVICTED_BLOCKS,
    FINISHED,
    HIT_TOKENS,
    PREEMPTIONS,
    PREFILL_TOKENS,
    RUNNING,
    STEPS,
    USED,
    WAITING,
    Timeline,
    add_state,
    usable,
)

DONE, STUCK, TIMELINE_FULL = 0, 1, 2
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


@inlined
def commit(
    settings: Settings,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    queues: Queues,
    now_s: float,
    first_output_s: float,
    target_sum: float,
    draft_sum: float,
) -> tuple[int, int]:
    """The end of a step: emit tokens, finish requests. Mutates; returns (tokens emitted, requests finished)."""
    emitted_tokens = 0
    finished = 0
    kept = 0
    scheduled = queues.counts[SCHEDULED]
    register_step = settings.prefix_caching and settings.visible == VISIBLE_STEP
    register_finish = settings.prefix_caching and settings.visible == VISIBLE_FINISH
    for place in range(queues.counts[RUNNING_COUNT]):
        request = queues.running[place]
        if place < scheduled:
            tokens = queues.tokens[place]
            before = requests.emitted[request]
            computed = requests.computed[request] + tokens
            if computed >= requests.input_tokens[request] + before:
                drafts = queues.drafts[place]
                accepted = 0
                if drafts > 0:
                    accepted = accepted_drafts(settings.seed, request, before, drafts, settings.acceptance)
                    requests.spec_steps[request] += 1
                    requests.draft_tokens[request] += drafts
                    requests.accepted_tokens[request] += accepted
                    computed -= drafts - accepted
                remaining = requests.output_tokens[request] - before
                emitted = accepted + 1
                if emitted > remaining:
                    requests.trimmed_tokens[request] += emitted - remaining
                    emitted = remaining
                requests.emitting_steps[request] += 1
                requests.emitted[request] = before + emitted
                emitted_tokens += emitted
                if before == 0:
                    requests.first_token_s[request] = now_s
                    requests.first_output_s[request] = first_output_s
                    requests.target_mark[request] = target_sum
                    requests.draft_mark[request] = draft_sum
                requests.computed[request] = computed
                if emitted == remaining:
                    requests.finish_s[request] = now_s
                    requests.decode_target_s[request] += target_sum - requests.target_mark[request]
                    requests.decode_draft_s[request] += draft_sum - requests.draft_mark[request]
                    if register_step or register_finish:
                        final = min(computed, requests.input_tokens[request] + before + emitted)
                        register_final(settings, pool, chains, requests, request, final)
                    release(pool, request, settings.unhashed_last)
                    finished += 1
                    continue
                if settings.draft_tokens > 0:
                    requests.has_drafts[request] = True
            else:
                requests.computed[request] = computed
            if register_step:
                register_final(settings, pool, chains, requests, request, computed)
        queues.running[kept] = request
        kept += 1
    queues.counts[RUNNING_COUNT] = kept
    return emitted_tokens, finished


@njit
def run_replica(
    settings: Settings,
    cost: LoweredCost,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    queues: Queues,
    timeline: Timeline,
    progress: Progress,
    mine: NDArray[np.int32],
) -> int:
    """Replay the requests `mine` (rows of the trace, by arrival) on one replica, from where `progress` stands.

    Returns DONE, STUCK, or TIMELINE_FULL: then call it again with a longer timeline. Mutates everything but settings, cost,
    chains and `mine`.
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
    while True:
        interval = int(now_s / settings.interval_s)
        if interval >= intervals:
            end = TIMELINE_FULL
            break
        while arrived < size and requests.arrival_s[mine[arrived]] <= now_s:
            timeline.counters[int(requests.arrival_s[mine[arrived]] / settings.interval_s), ARRIVALS] += 1
            push_waiting(queues, mine[arrived])
            arrived += 1
        if queues.counts[RUNNING_COUNT] == 0 and queues.counts[WAITING_COUNT] == 0:
            if arrived == size:
                end = DONE
                break
            next_s = requests.arrival_s[mine[arrived]]
            if int(next_s / settings.interval_s) >= intervals:
                end = TIMELINE_FULL
                break
            add_state(timeline, now_s, next_s, settings.interval_s, 0, 0, 0, pool.totals[CACHED])
            now_s = next_s
            continue

        evicted_before = pool.totals[EVICTED]
        batch = schedule(settings, pool, chains, requests, queues, now_s, target_sum, draft_sum)
        if batch.rows == 0:
            break
        gemm, prefill, decode, communication, sampling, draft, overhead = step_components(
            cost,
            batch.tokens,
            batch.rows,
            batch.sampled,
            float(batch.prefill_pairs),
            float(batch.prefill_context),
            float(batch.decode_pairs),
            float(batch.decode_context),
            settings.draft_tokens,
        )
        duration = gemm + prefill + decode + communication + sampling + draft + overhead
        waiting, running = queues.counts[WAITING_COUNT], queues.counts[RUNNING_COUNT]
        used, cached = pool.totals[CAPACITY] - free_blocks(pool), pool.totals[CACHED]
        reached = int((now_s + duration) / settings.interval_s)
        if reached == interval:
            timeline.integrals[interval, WAITING] += waiting * duration
            timeline.integrals[interval, RUNNING] += running * duration
            timeline.integrals[interval, USED] += used * duration
            timeline.integrals[interval, CACHED_FREE] += cached * duration
        elif reached < intervals:
            add_state(timeline, now_s, now_s + duration, settings.interval_s, waiting, running, used, cached)
        else:  # the step is finished first; its state is booked when the timeline is longer
            progress.due[DUE_FROM], progress.due[DUE_TO] = now_s, now_s + duration
            progress.counts[DUE_WAITING], progress.counts[DUE_RUNNING] = waiting, running
            progress.counts[DUE_USED], progress.counts[DUE_CACHED] = used, cached
        timeline.components[interval, 0] += gemm
        timeline.components[interval, 1] += prefill
        timeline.components[interval, 2] += decode
        timeline.components[interval, 3] += communication
        timeline.components[interval, 4] += sampling
        timeline.components[interval, 5] += draft
        timeline.components[interval, 6] += overhead
        now_s += duration
        target_sum += gemm + prefill + decode + communication
        draft_sum += draft
        emitted, finished = commit(
            settings, pool, chains, requests, queues, now_s, sampling + draft, target_sum, draft_sum
        )
        steps += 1
        timeline.counters[interval, STEPS] += 1
        timeline.counters[interval, FINISHED] += finished
        timeline.counters[interval, PREFILL_TOKENS] += batch.prefill_tokens
        timeline.counters[interval, DECODE_TOKENS] += batch.decode_tokens
        timeline.counters[interval, EMITTED_TOKENS] += emitted
        timeline.counters[interval, HIT_TOKENS] += batch.hit_tokens
        timeline.counters[interval, EVICTED_BLOCKS] += pool.totals[EVICTED] - evicted_before
        timeline.counters[interval, PREEMPTIONS] += batch.preemptions
        if reached >= intervals:
            end = TIMELINE_FULL
            break
    progress.clock[NOW], progress.clock[TARGET_SUM], progress.clock[DRAFT_SUM] = now_s, target_sum, draft_sum
    progress.counts[ARRIVED], progress.counts[STEPS_DONE] = arrived, steps
    return end
