"""What a replica did, by interval: counters, integrals over time, seconds by component. See docs/replay.md, 'Timeline'."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from schemas.outcome import COMPONENTS, TIMELINE_COUNTERS, TIMELINE_INTEGRALS

# Columns of `Timeline.counters`, in the order of TIMELINE_COUNTERS.
(
    ARRIVALS,
    FINISHED,
    STEPS,
    PREFILL_TOKENS,
    DECODE_TOKENS,
    EMITTED_TOKENS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    HIT_TOKENS,
    REHIT_TOKENS,
    EVICTED_BLOCKS,
    EVICTED_DECODE_BLOCKS,
    EXPIRED_BLOCKS,
    PREEMPTIONS,
) = range(len(TIMELINE_COUNTERS))
# Columns of `Timeline.integrals`, in the order of TIMELINE_INTEGRALS.
WAITING, RUNNING, USED, CACHED_FREE = range(len(TIMELINE_INTEGRALS))

_COUNTERS, _INTEGRALS, _COMPONENTS = len(TIMELINE_COUNTERS), len(TIMELINE_INTEGRALS), len(COMPONENTS)


class Timeline(NamedTuple):
    """One row per interval from time 0 on; as many rows as were needed so far, or more.

    The last row stays to spare: where a time falls on a border by rounding, `add_state` books one row later than
    ``int(time / interval_s)`` says, and compiled code checks no bounds.
    """

    counters: NDArray[np.int64]  # [intervals, TIMELINE_COUNTERS]
    integrals: NDArray[np.float64]  # [intervals, TIMELINE_INTEGRALS] unit-seconds
    components: NDArray[np.float64]  # [intervals, COMPONENTS] seconds


def new_timeline(intervals: int) -> Timeline:
    """An empty timeline."""
    return Timeline(
        np.zeros((intervals, _COUNTERS), np.int64),
        np.zeros((intervals, _INTEGRALS), np.float64),
        np.zeros((intervals, _COMPONENTS), np.float64),
    )


@njit
def usable(timeline: Timeline) -> int:
    """Intervals that may be booked: all rows but the spare one."""
    return timeline.counters.shape[0] - 1


def longer(timeline: Timeline) -> Timeline:
    """The same timeline with room for twice as many intervals."""
    have = timeline.counters.shape[0]
    doubled = new_timeline(2 * have)
    for old, new in zip(timeline, doubled, strict=True):
        new[:have] = old
    return doubled


@njit
def add_state(
    timeline: Timeline,
    start_s: float,
    end_s: float,
    interval_s: float,
    waiting: int,
    running: int,
    used_blocks: int,
    cached_blocks: int,
) -> None:
    """The state between two events, cut at the intervals' borders. Mutates. `usable(timeline)` rows must reach `end_s`."""
    now = start_s
    while now < end_s:
        interval = int(now / interval_s)
        border = min(end_s, (interval + 1) * interval_s)
        if border <= now:  # rounding put `now` on the border already
            interval += 1
            border = min(end_s, (interval + 1) * interval_s)
        span = border - now
        timeline.integrals[interval, WAITING] += waiting * span
        timeline.integrals[interval, RUNNING] += running * span
        timeline.integrals[interval, USED] += used_blocks * span
        timeline.integrals[interval, CACHED_FREE] += cached_blocks * span
        now = border
