"""The random numbers behind acceptance, and what they make of a chain of drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.replay.speculation import accepted_levels, chain, mix, proposals_of, uniform
from tests.reference import engine as reference


def test_published_outputs_of_splitmix64():
    """The first outputs of SplitMix64 from seed 0; state k is k times the golden gamma."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for step, output in enumerate(outputs):
        state = (step * gamma) % 2**64
        assert int(mix(np.uint64(state))) == output
        assert reference.mix(state) == output


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_uniform_equals_the_reference(seed, request, position):
    value = uniform(np.uint64(seed), request, position)
    assert 0 <= value < 1
    assert value == reference.uniform(seed, request, position)


def proposals(*rates: float, seed: int = 1, requests: int = 40_000):
    return proposals_of(chain(*rates), requests, 8, seed)


def test_accepted_drafts_follow_the_conditional_rates():
    """Share of steps in which the first i drafts were all accepted: the product of the rates, within 5 standard errors."""
    rates = (0.8, 0.5, 0.9)
    steps, drawn = 40_000, proposals(*rates, seed=3)
    accepted = np.array([accepted_levels(drawn, request, 4 * request, 3) for request in range(steps)])
    for drafts in (1, 2, 3):
        share = float(np.prod(rates[:drafts]))
        error = (share * (1 - share) / steps) ** 0.5
        assert np.mean(accepted >= drafts) == pytest.approx(share, abs=5 * error)


def test_equal_rates_give_leviathans_formula():
    """Expected tokens per step (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192), within 5 standard errors."""
    a, k, steps = 0.7, 5, 40_000
    drawn = proposals(*(a,) * k, seed=9)
    tokens = np.array([1 + accepted_levels(drawn, request, 0, k) for request in range(steps)])
    assert tokens.mean() == pytest.approx((1 - a ** (k + 1)) / (1 - a), abs=5 * tokens.std() / steps**0.5)


def test_luck_belongs_to_the_position():
    """Fewer drafts see the same luck: whatever k, the accepted prefix is the same as far as it goes."""
    drawn = proposals(0.7, 0.7, 0.7, 0.7)
    for request in range(500):
        longest = accepted_levels(drawn, request, 17, 4)
        for drafts in range(5):
            assert accepted_levels(drawn, request, 17, drafts) == min(drafts, longest)
