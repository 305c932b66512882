"""When each step of a replica ended, and from that every gap between a request's tokens: ITL at no cost in the loop.

A running request emits in every step, so its gaps are the durations of the steps from its first token to its end. Only the
steps in which it emitted nothing need to be noted: it was preempted, recomputed in chunks, or found no budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

ITL_QUANTILE = 0.99

_BLOCK_SHIFT = 4
_BLOCK_MASK = 15


class StepLog(NamedTuple):
    """One replica's steps."""

    totals: Ints  # [1] silences noted
    end_s: Floats  # [steps, or more] when each step ended
    silent_request: Ints  # [silences, or more] a request that emitted nothing ...
    silent_first: Ints  # ... from this step
    silent_last: Ints  # ... to this one
    features: Floats  # [steps, or more; STEP_FEATURES] what each computed (docs/replay.md), [0, STEP_FEATURES] where nobody asked
    start_s: Floats  # [the same] when it started
    left: NDArray[
        np.bool_
    ]  # [the same] whether work was left for later: requests in the queue, or no token of the budget


STEP_FEATURES = 13


def new_step_log(steps: int, silences: int, *, features: bool = False) -> StepLog:
    """Room for so many steps and silences; `features`: keep what every step computed."""
    return StepLog(
        np.zeros(1, np.int32),
        np.empty(steps, np.float64),
        np.empty(silences, np.int32),
        np.empty(silences, np.int32),
        np.empty(silences, np.int32),
        np.empty((steps if features else 0, STEP_FEATURES), np.float64),
        np.empty(steps if features else 0, np.float64),
        np.empty(steps if features else 0, np.bool_),
    )


def longer_log(log: StepLog, silences_per_step: int) -> StepLog:
    """The same log with room for twice as much, and for one more step in any case."""

    def doubled(values: NDArray[np.generic], least: int) -> NDArray[np.generic]:
        more = max(values.shape[0], least) if values.shape[0] or least else 0
        return np.concatenate([values, np.empty((more, *values.shape[1:]), values.dtype)])

    return StepLog(
        log.totals,
        doubled(log.end_s, 1),  # type: ignore[arg-type]
        *(doubled(each, silences_per_step) for each in log[2:5]),  # type: ignore[arg-type]
        *(doubled(each, 0) for each in log[5:]),
    )


@njit
def note_silent(log: StepLog, request: int, first: int, last: int) -> None:
    """A request that has emitted before emits nothing in these steps. Mutates."""
    place = log.totals[0]
    log.totals[0] = place + 1
    log.silent_request[place] = request
    log.silent_first[place] = first
    log.silent_last[place] = last


def inter_token_latencies(
    log: StepLog,
    steps: int,
    mine: Ints,
    first_step: Ints,
    emitting_steps: Ints,
    silent_steps: Ints,
    itl_max_s: Floats,
    itl_p99_s: Floats,
) -> None:
    """Fill in the longest gap and the 99th percentile of each of `mine` that emitted at least twice. Mutates the last two.

    `steps`: how many the replica took. The percentile is linear between order statistics, as numpy's default.
    """
    silences = log.totals[0]
    order = np.argsort(log.silent_request[:silences], kind="stable").astype(np.int32)  # noted in order of steps
    silent_request = log.silent_request[:silences][order]
    begin = np.searchsorted(silent_request, mine).astype(np.int32)
    most = int(emitting_steps[mine].max(initial=0))
    longest_of = np.zeros((steps >> _BLOCK_SHIFT) + 1, np.float64)
    _longest_of_blocks(log.end_s, steps, longest_of)
    _latencies(
        log.end_s,
        longest_of,
        log.silent_first[:silences][order],
        log.silent_last[:silences][order],
        mine,
        begin,
        first_step,
        emitting_steps,
        silent_steps,
        np.empty(int(most * (1 - ITL_QUANTILE)) + 4, np.float64),
        itl_max_s,
        itl_p99_s,
    )


@njit
def _longest_of_blocks(end_s: Floats, steps: int, longest_of: Floats) -> None:
    """Fill in the longest step of every 16. Mutates `longest_of`."""
    for step in range(1, steps):
        block = step >> _BLOCK_SHIFT
        longest_of[block] = max(longest_of[block], end_s[step] - end_s[step - 1])


@njit
def _enter(largest: Floats, size: int, k: int, gap: float) -> int:
    """Keep the `k` longest gaps in a heap, the shortest of them on top; returns how many are kept. Mutates `largest`."""
    if size < k:
        place = size
        while place > 0 and largest[(place - 1) >> 1] > gap:
            largest[place] = largest[(place - 1) >> 1]
            place = (place - 1) >> 1
        largest[place] = gap
        return size + 1
    if gap > largest[0]:
        place = 0
        while True:
            child = 2 * place + 1
            if child >= size:
                break
            if child + 1 < size and largest[child + 1] < largest[child]:
                child += 1
            if largest[child] >= gap:
                break
            largest[place] = largest[child]
            place = child
        largest[place] = gap
    return size


@njit
def _latencies(
    end_s: Floats,
    longest_of: Floats,
    silent_first: Ints,
    silent_last: Ints,
    mine: Ints,
    begin: Ints,
    first_step: Ints,
    emitting_steps: Ints,
    silent_steps: Ints,
    largest: Floats,
    itl_max_s: Floats,
    itl_p99_s: Floats,
) -> None:
    """Order statistic `below` of the gaps is the shortest of the k longest. Mutates `largest` and the last two.

    Once k gaps are kept, 16 steps of which the longest is no longer than the shortest kept are passed over at once.
    """
    for index in range(mine.shape[0]):
        request = mine[index]
        gaps = emitting_steps[request] - 1
        if gaps < 1:
            continue
        at = ITL_QUANTILE * (gaps - 1)
        below = int(at)
        k = gaps - below
        step = first_step[request]
        last = step + gaps + silent_steps[request]
        size = 0
        longest = 0.0
        if silent_steps[request] == 0:
            step += 1
            while step <= last:
                if size == k and step & _BLOCK_MASK == 0 and longest_of[step >> _BLOCK_SHIFT] <= largest[0]:
                    step += _BLOCK_MASK + 1
                    continue
                gap = end_s[step] - end_s[step - 1]
                if size < k or gap > largest[0]:
                    longest = max(longest, gap)
                    size = _enter(largest, size, k, gap)
                step += 1
        else:
            silence = begin[index]
            silent_left = silent_steps[request]
            before_s = end_s[step]
            while step < last:
                step += 1
                if silent_left > 0 and silent_first[silence] == step:
                    silent_left -= silent_last[silence] - step + 1
                    step = silent_last[silence]
                    silence += 1
                    continue
                gap = end_s[step] - before_s
                before_s = end_s[step]
                longest = max(longest, gap)
                size = _enter(largest, size, k, gap)
        above = largest[0]
        if size > 2:
            above = min(largest[1], largest[2])
        elif size == 2:
            above = largest[1]
        itl_max_s[request] = longest
        itl_p99_s[request] = largest[0] + (at - below) * (above - largest[0])
