"""The fixed schedule: latencies by sums of steps, elasticities by hand and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.cost.build import build_hardware
from pipeline.cost.elasticity import ALL_KINDS, RATE_KINDS, slowed, slowness_gradients, step_gradients
from pipeline.cost.model import FEATURES
from pipeline.estimate import decode_step, prefill_step, scenario_of
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from pipeline.schedule import METRICS, elasticity_rows, fixed_schedule, quantile_weights

SCENARIO = scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4)


def replayed(n=400, replicas=2, gap_s=0.05, pool_blocks=3000, seed=3):
    rng = np.random.default_rng(seed)
    built = build_hardware(SCENARIO)
    arrivals = Arrivals(
        arrival_s=np.cumsum(rng.exponential(gap_s, n)),
        input_tokens=rng.integers(20, 3000, n).astype(np.int32),
        output_tokens=rng.integers(1, 200, n).astype(np.int32),
        block_offsets=np.zeros(n + 1, np.int64),
        block_ids=np.zeros(0, np.uint32),
        trace_block_tokens=None,
    )
    config = EngineConfig(
        replicas=replicas, block_tokens=16, pool_blocks=pool_blocks, max_batched_tokens=2048, max_sequences=64,
        max_model_len=8192, keep_steps=True,
    )  # fmt: skip
    return built, replay(arrivals, config, built.lowered)


@pytest.mark.parametrize("case", [{}, {"gap_s": 3.0}, {"replicas": 7, "n": 5}, {"pool_blocks": 520, "gap_s": 0.01}])
def test_latencies_are_sums_of_steps(case):
    """Idle gaps, replicas without a request, preemptions: the sums are the replay's own times."""
    _, result = replayed(**case)
    schedule = fixed_schedule(result, np.ones(result.refused.shape[0], bool))
    requests = result.requests
    np.testing.assert_allclose(schedule.latencies("ttft"), requests.first_token_s - requests.arrival_s, rtol=1e-9)
    np.testing.assert_allclose(schedule.latencies("e2e"), requests.finish_s - requests.arrival_s, rtol=1e-9)
    tpot = (requests.finish_s - requests.first_token_s) / np.maximum(1, requests.emitted - 1)
    several = requests.emitted > 1
    np.testing.assert_allclose(schedule.latencies("tpot")[several], tpot[several], rtol=1e-9)
    assert np.isnan(schedule.latencies("tpot")[~several]).all()
    if "pool_blocks" in case:
        assert requests.preemptions.sum() > 0


def test_the_kept_features_are_the_steps():
    built, result = replayed()
    for each in result.schedules:
        with torch.no_grad():
            seconds = built.cost_model(torch.from_numpy(each.features)).sum(dim=-1).numpy()
        np.testing.assert_allclose(seconds, each.end_s - each.start_s, rtol=1e-6)


def test_only_measured_requests_count():
    _, result = replayed()
    measured = np.arange(result.refused.shape[0]) >= 100
    schedule = fixed_schedule(result, measured)
    assert schedule.requests.tolist() == list(range(100, 400))


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.95, 1.0])
def test_quantile_weights_are_numpys_quantile(q):
    values = np.array([3.0, np.nan, 1.0, 10.0, 2.5, 7.0])
    rows, weights = quantile_weights(values, q)
    assert values[rows] @ weights == pytest.approx(np.nanquantile(values, q))
    assert quantile_weights(np.array([4.0]), q)[1].sum() == 1.0


def test_elasticities_against_a_finite_difference():
    """Durations from the module with one kind slower, the schedule as it was: the percentile moves as the slope says."""
    built, result = replayed()
    schedule = fixed_schedule(result, np.ones(result.refused.shape[0], bool))
    features = torch.from_numpy(schedule.features)
    rows = {row["metric"]: row for row in elasticity_rows(schedule, built.cost_model)}
    h = 1e-6
    for kind in ALL_KINDS:
        with torch.no_grad():
            seconds = [
                slowed(built.cost_model, features, {kind: torch.tensor(sign * h)}).numpy() for sign in (1.0, -1.0)
            ]
        for metric in METRICS:
            latency, p = metric.split("_p")
            slower, faster = (np.nanquantile(schedule.latencies(latency, each), float(p) / 100) for each in seconds)
            slope = (np.log(slower) - np.log(faster)) / (2 * h)
            found = rows[metric][f"elasticity_{kind}"] * (-1 if kind in RATE_KINDS else 1)
            assert found == pytest.approx(slope, abs=1e-5), (metric, kind)
    for metric, row in rows.items():
        by_kind = sum(row[f"elasticity_{kind}"] * (-1 if kind in RATE_KINDS else 1) for kind in ALL_KINDS)
        assert row["elasticity_all"] == pytest.approx(by_kind)
        if metric.startswith("tpot"):
            assert row["elasticity_all"] == pytest.approx(1.0)
        else:
            assert row["elasticity_all"] >= 1.0 - 1e-9


def by_hand(arrival_s, budget):
    """Elasticities of the last of some requests of 2,000 prompt tokens and one output token on one replica."""
    built, n = build_hardware(SCENARIO), len(arrival_s)
    arrivals = Arrivals(
        np.array(arrival_s), np.full(n, 2000, np.int32), np.full(n, 1, np.int32), np.zeros(n + 1, np.int64),
        np.zeros(0, np.uint32), None,
    )  # fmt: skip
    config = EngineConfig(
        replicas=1, block_tokens=16, pool_blocks=3000, max_batched_tokens=budget, max_sequences=64, max_model_len=8192, keep_steps=True
    )  # fmt: skip
    schedule = fixed_schedule(replay(arrivals, config, built.lowered), np.arange(n) == n - 1)
    return elasticity_rows(schedule, built.cost_model, ("ttft_p95", "tpot_p50"))


def test_a_lonely_request_by_hand():
    """Nobody else: TTFT is its own prefill, so everything slower by 1 % makes it 1 % longer. Nor is there a TPOT of one token."""
    alone, no_tpot = by_hand([0.0], 4000)
    assert alone["elasticity_all"] == pytest.approx(1.0)
    assert set(no_tpot.values()) == {"tpot_p50", None}


def test_a_backlog_by_hand():
    """The second arrives half a prefill after the first."""
    prefill_s = by_hand([0.0], 4000)[0]["value_ms"] / 1e3
    # The first leaves half of the budget unused: the rest of its step, and the second's own. Both grow by 1 %.
    second, _ = by_hand([0.0, prefill_s / 2], 4000)
    assert second["value_ms"] == pytest.approx(1.5e3 * prefill_s, rel=1e-6)
    assert second["elasticity_all"] == pytest.approx(1.0)
    # The first spends the budget: a backlog since 0. TTFT is two prefills less half a one, 1 % of two over one and a half.
    second, _ = by_hand([0.0, prefill_s / 2], 2000)
    assert second["value_ms"] == pytest.approx(1.5e3 * prefill_s, rel=1e-6)
    assert second["elasticity_all"] == pytest.approx(2 / 1.5, rel=1e-6)
    # A third, in the second's step: the backlog still began at 0.
    third, _ = by_hand([0.0, prefill_s / 2, 1.5 * prefill_s], 2000)
    assert third["elasticity_all"] == pytest.approx(3 / 1.5, rel=1e-6)
    # After a pause there is none.
    later, _ = by_hand([0.0, prefill_s / 2, 10.0 * prefill_s], 2000)
    assert later["elasticity_all"] == pytest.approx(1.0)


def test_forward_and_reverse_autograd_agree():
    model = build_hardware(scenario_of("deepseek-v3", "h200", tensor_parallel=8, weight_dtype="fp8")).cost_model
    steps = [decode_step(1, 300), decode_step(24, 900), prefill_step(0, 300), prefill_step(2048, 100)]
    features = torch.tensor([[step.get(name, 0) for name in FEATURES] for step in steps], dtype=torch.float64)
    seconds, forward = step_gradients(model, features)
    for row in range(len(steps)):
        total = model(features)[row].sum()
        reverse = slowness_gradients(model, total)
        assert forward[row].tolist() == pytest.approx([reverse[kind] for kind in ALL_KINDS], abs=1e-15)
        assert forward[row].sum().item() == pytest.approx(seconds[row].item())  # homogeneous
