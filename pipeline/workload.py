"""What a scenario does to the trace's arrivals before they are replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from pipeline.replay.speculation import mix, uniform_at
from schemas.study import Workload

TICK_QUANTILE = 0.01
"""Which of the gaps between distinct timestamps counts as the log's tick; the very smallest may be a clock's jitter."""

_SPREAD_STREAM = 0x5350524541440000
"""Keeps the spread's random numbers apart from those of speculation under the same seed."""


@dataclass(frozen=True)
class TransformedArrivals:
    """Arrivals in seconds, in the trace's order, and what was done to them."""

    arrival_s: NDArray[np.float64]
    tick_s: float | None  # width over which shared timestamps were spread; null = they were not


def transform(arrival_us: NDArray[np.int64], workload: Workload, seed: int) -> TransformedArrivals:
    """Apply `workload` to sorted arrivals, microseconds. The same seed gives the same arrivals in every scenario."""
    seconds = arrival_us / 1e6
    tick_s = None
    if workload.spread_ticks:
        tick_us = log_tick_us(arrival_us)
        if tick_us is not None:
            offsets = _offsets(arrival_us, tick_us, np.uint64(seed))
            seconds = seconds + offsets / 1e6
            tick_s = tick_us * 1e-6
    return TransformedArrivals(seconds / workload.rate, tick_s)


def log_tick_us(arrival_us: NDArray[np.int64]) -> int | None:
    """The resolution of the log's clock: a low quantile of the gaps between distinct timestamps. None without gaps."""
    gaps = np.diff(np.unique(arrival_us))
    if gaps.size == 0:
        return None
    return int(np.quantile(gaps, TICK_QUANTILE, method="lower"))


@njit
def _fill_offsets(arrival_us: NDArray[np.int64], tick_us: int, seed: np.uint64, offsets: NDArray[np.float64]) -> None:
    """Uniform numbers times the width to the next timestamp, at most a tick; not yet in order within a tick."""
    n = arrival_us.shape[0]
    stream = mix(mix(seed) ^ np.uint64(_SPREAD_STREAM))
    first = 0
    while first < n:
        last = first
        while last + 1 < n and arrival_us[last + 1] == arrival_us[first]:
            last += 1
        width = tick_us
        if last + 1 < n:
            width = min(width, arrival_us[last + 1] - arrival_us[first])
        if last > first:
            for request in range(first, last + 1):
                offsets[request] = uniform_at(stream, request) * width
        first = last + 1


def _offsets(arrival_us: NDArray[np.int64], tick_us: int, seed: np.uint64) -> NDArray[np.float64]:
    """Microseconds to add to each arrival: sorted uniforms among those that share a timestamp, so the order stays.

    That is how a Poisson stream falls inside a tick, given how many fell into it. A timestamp of one request stays.
    """
    offsets = np.zeros(arrival_us.shape[0])
    _fill_offsets(arrival_us, tick_us, seed, offsets)
    order = np.lexsort((offsets, arrival_us))
    return offsets[order]
