"""The state between events, cut at the intervals' borders: nothing lost, nothing outside, whatever the rounding."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.replay.timeline import RUNNING, Timeline, add_state, longer, new_timeline, usable


@pytest.mark.parametrize("width", [0.1, 0.3, 0.7, 1.1, 10.0])
def test_nothing_is_lost_at_borders(width):
    """From and to every border and its neighbours in floating point; rows only up to where the end falls, and a spare one."""
    for border in range(1, 120):
        exact = border * width
        for start in (np.nextafter(exact, 0), exact, np.nextafter(exact, 1e9)):
            for end in (np.nextafter(start, 1e9), start + width / 3, start + 2.5 * width):
                guarded = new_timeline(int(end / width) + 3)
                rows = Timeline(*(each[:-1] for each in guarded))  # the last row lies behind what is handed over
                assert int(end / width) < usable(rows)
                add_state(rows, start, end, width, 0, 1, 0, 0)
                booked = guarded.integrals[:, RUNNING]
                assert booked.sum() == pytest.approx(end - start, rel=1e-9)
                assert booked[-1] == 0, "booked outside"
                assert booked.max() <= width * (1 + 1e-12)


def test_longer_keeps_what_is_booked():
    timeline = new_timeline(3)
    add_state(timeline, 0.5, 1.75, 1.0, 2, 3, 4, 5)
    doubled = longer(timeline)
    assert doubled.integrals.shape[0] == 6 and usable(doubled) == 5
    assert doubled.integrals[:2].tolist() == [[1.0, 1.5, 2.0, 2.5], [1.5, 2.25, 3.0, 3.75]]
    assert doubled.integrals[2:].sum() == 0
