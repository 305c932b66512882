"""Which drafts are accepted: a counter-based hash, so that luck belongs to a request's position, not to the schedule.

Two scenarios that verify the same draft position of the same request at output position p see the same random number. Source
of the mixing function: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@njit
def mix(value: np.uint64) -> np.uint64:
    """SplitMix64's next output from the state `value`."""
    z = value + _GAMMA
    z = (z ^ (z >> _SHIFT_30)) * _MULTIPLIER_1
    z = (z ^ (z >> _SHIFT_27)) * _MULTIPLIER_2
    return z ^ (z >> _SHIFT_31)


@njit
def uniform(seed: np.uint64, request: int, position: int) -> float:
    """A number in [0, 1) that depends on these three and nothing else."""
    return uniform_at(mix(mix(seed) ^ np.uint64(request)), position)


@njit
def uniform_at(stream: np.uint64, position: int) -> float:
    """The same, from `mix(mix(seed) ^ request)`, which is worth computing once per step."""
    return float(mix(stream ^ np.uint64(position)) >> _SHIFT_11) * 2.0**-53


@njit
def accepted_drafts(seed: np.uint64, request: int, position: int, drafts: int, acceptance: NDArray[np.float64]) -> int:
    """How many of `drafts` drafts are accepted, the first of which stands at output `position` (0-based).

    `acceptance[i]`: probability of draft i + 1, given that all before it were accepted.
    """
    stream = mix(mix(seed) ^ np.uint64(request))
    count = 0
    while count < drafts and uniform_at(stream, position + count) < acceptance[count]:
        count += 1
    return count
