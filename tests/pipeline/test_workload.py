"""Arrivals: rate, and the spread inside a coarse clock's ticks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.trace import read_trace
from pipeline.workload import log_tick_us, transform
from schemas.study import Workload

SPREAD = Workload(spread_ticks=True)


def test_as_logged_by_default():
    arrivals = np.array([0, 10, 10, 2_000_000], np.int64)
    assert transform(arrivals, Workload(), 1).arrival_s.tolist() == [0.0, 1e-5, 1e-5, 2.0]
    assert transform(arrivals, Workload(rate=2.0), 1).arrival_s.tolist() == [0.0, 5e-6, 5e-6, 1.0]


def test_the_conversation_trace_ticks_every_three_seconds(conversation):
    trace = read_trace(conversation)
    assert 2_990_000 <= log_tick_us(trace.arrival_us) <= 3_003_000
    spread = transform(trace.arrival_us, SPREAD, 1).arrival_s
    offset = spread - trace.arrival_us * 1e-6
    shared = np.isin(
        trace.arrival_us, np.unique(trace.arrival_us)[np.unique(trace.arrival_us, return_counts=True)[1] > 1]
    )
    assert np.all(np.diff(spread) >= 0), "the log's order stays"
    assert offset.min() >= 0 and offset.max() < 3.003
    assert np.all(offset[~shared] == 0), "a timestamp of its own stays"
    # Uniform over a tick of 3 s: mean 1.5 s; its standard error over 12,000 requests is 3 / sqrt(12 * 12,000) = 0.008 s.
    assert abs(offset[shared].mean() - 1.5) < 0.04
    assert np.unique(spread).size == spread.size


def test_the_seed_decides_and_nothing_else(conversation):
    arrivals = read_trace(conversation).arrival_us
    first, again, other = (transform(arrivals, SPREAD, seed).arrival_s for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    faster = transform(arrivals, Workload(spread_ticks=True, rate=2.0), 1).arrival_s
    assert np.allclose(faster, first / 2, rtol=1e-15)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 2**63 - 1))
def test_order_and_ticks_are_kept(gaps, seed):
    arrivals = np.cumsum(np.array(gaps, np.int64) // 20 * 1000)
    spread = transform(arrivals, SPREAD, seed).arrival_s
    assert np.all(np.diff(spread) >= 0)
    later = np.searchsorted(arrivals, arrivals, side="right")
    following = np.where(later < arrivals.size, arrivals[np.minimum(later, arrivals.size - 1)], np.iinfo(np.int64).max)
    assert np.all(spread * 1e6 <= following), "never past the next timestamp"


def test_one_timestamp_for_all_has_no_tick():
    arrivals = np.zeros(4, np.int64)
    spread = transform(arrivals, SPREAD, 1)
    assert spread.tick_s is None
    assert spread.arrival_s.tolist() == [0.0] * 4
