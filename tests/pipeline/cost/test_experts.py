"""Experts: how many are visited, on which rank, and how long that takes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

from benchmarks.accuracy import MEASUREMENTS, SOURCES
from pipeline.cost import measurements
from pipeline.cost.defaults import completed
from pipeline.cost.experts import MixtureOfExperts, balanced, maximum_of_normals, uniform
from pipeline.estimate import estimate, scenario_of
from schemas import hardware
from schemas.calibration import for_gpu, shipped


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_one_rank_by_hand():
    """Qwen3-30B-A3B, 8 of 128 experts, 64 tokens: 512 visits of 128 (1 - (15/16)^64) = 125.9 experts."""
    load = uniform(t(1, 64), 128, 8, 1)
    assert load.visits.tolist() == [8, 512]
    assert load.distinct.tolist() == pytest.approx([8, 128 * (1 - (15 / 16) ** 64)])


def test_timings_deal_visits_out_evenly():
    load = balanced(t(1, 32, 64), t(256, 256, 256), t(8, 8, 8), t(1, 1, 8))
    assert load.visits.tolist() == [8, 256, 64]
    assert load.distinct.tolist() == [8, 256, 32]


def test_maximum_of_normals():
    """Two: 1 / sqrt(pi); tables (Teichroew 1956): 4 1.02938, 8 1.42360."""
    assert maximum_of_normals(1) == 0
    assert maximum_of_normals(2) == pytest.approx(np.pi**-0.5, abs=1e-6)
    assert maximum_of_normals(4) == pytest.approx(1.02938, abs=1e-4)
    assert maximum_of_normals(8) == pytest.approx(1.42360, abs=1e-4)


@pytest.mark.parametrize(("experts", "per_token", "ranks"), [(256, 8, 8), (128, 8, 4), (8, 2, 2), (160, 8, 2)])
@pytest.mark.parametrize("tokens", [1, 4, 32, 200])
def test_the_busiest_rank_against_drawing(experts, per_token, ranks, tokens):
    """2,000 layers, each token choosing k different experts at random: means of the fullest rank's visits and distinct experts."""
    random = np.random.default_rng(0)
    visits, distinct = [], []
    for _ in range(2000):
        chosen = np.argpartition(random.random((tokens, experts)), per_token - 1, axis=1)[:, :per_token]
        counts = np.bincount(chosen.ravel(), minlength=experts).reshape(ranks, -1)
        visits.append(counts.sum(1).max())
        distinct.append((counts > 0).sum(1).max())
    load = uniform(t(tokens), experts, per_token, ranks)
    assert load.visits.item() == pytest.approx(np.mean(visits), rel=0.08)
    assert load.distinct.item() == pytest.approx(np.mean(distinct), rel=0.08)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_rank_never_has_more_than_there_is(ranks):
    tokens = t(*range(1, 3000, 7))
    load = uniform(tokens, 256, 8, ranks)
    assert (load.distinct <= 256 / ranks).all() and (load.distinct <= load.visits).all()
    assert (load.visits >= tokens * 8 / ranks - 1e-9).all() and (load.visits <= tokens * 8).all()
    assert (load.visits.diff() > 0).all() and (load.distinct.diff() > -1e-9).all()


def law_and_measured(gpu, dtype, hidden, width, experts, per_token, tp, ep):
    """[tokens] microseconds of the shipped law and of the database, tokens from 1 to 512."""
    table = measurements.moe_timings(MEASUREMENTS / "ops", SOURCES[gpu][0], measurements.EXPERT_FORMATS[dtype])
    rows = table.filter(
        (pl.col("hidden") == hidden) & (pl.col("intermediate") == width) & (pl.col("experts") == experts)
        & (pl.col("top_k") == per_token) & (pl.col("tp") == tp) & (pl.col("ep") == ep) & (pl.col("tokens") <= 512)
    )  # fmt: skip
    assert rows.height > 10
    tokens = t(*rows["tokens"].to_list())
    load = balanced(tokens, t(experts), t(per_token), t(ep))
    law = MixtureOfExperts(for_gpu(gpu).experts[dtype])
    us = law.law_us(
        tokens,
        load,
        tokens * per_token,
        3.0 * hidden * width / tp,
        hidden,
        width / tp,
        hardware.BYTES_PER_WEIGHT[dtype],
    )
    return us.detach().numpy(), rows["us"].to_numpy()


@pytest.mark.parametrize(
    ("gpu", "dtype", "hidden", "width", "experts", "per_token", "tp", "ep"),
    [
        ("h200", "fp8", 6144, 2048, 256, 8, 8, 1),
        ("h200", "fp8", 6144, 2048, 256, 8, 1, 8),
        ("h200", "fp8", 7168, 2048, 384, 8, 8, 1),
        ("h100-sxm", "fp8", 7168, 2048, 384, 8, 8, 1),
        ("b200", "fp8", 6144, 2048, 256, 8, 8, 1),
        ("h200", "bf16", 6144, 2048, 256, 8, 8, 1),
        ("h200", "bf16", 6144, 2048, 256, 8, 1, 8),
    ],
)
def test_the_law_near_deepseeks_shape(gpu, dtype, hidden, width, experts, per_token, tp, ep):
    """Up to 512 tokens within 22 % at the median and a third at most: the fp8 fit was once off by a factor of six here."""
    ours, measured = law_and_measured(gpu, dtype, hidden, width, experts, per_token, tp, ep)
    off = np.abs(ours / measured - 1)
    assert np.median(off) < 0.22 and off.max() < 0.34, off


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200", "b200", "l40s", "rtx-pro-6000"])
def test_half_the_bytes_are_never_slower_in_a_decode_step(gpu):
    more = {"gpu_memory_utilization": 0.98} if gpu == "l40s" else {}
    rows = {
        dtype: estimate(scenario_of("qwen3-30b-a3b", gpu, tensor_parallel=2, weight_dtype=dtype, **more), [64], [1024])[
            1
        ]
        for dtype in ("bf16", "fp8", "int4")
    }
    bf16, fp8, int4 = (rows[dtype][0]["tpot_ms"] for dtype in ("bf16", "fp8", "int4"))
    assert 0.45 * bf16 < fp8 < bf16 and 0.3 * bf16 < int4 < bf16


def test_deepseek_calibrated_is_near_its_data_sheet():
    calibrated, plain = (
        estimate(
            scenario_of("deepseek-v3", "h200", tensor_parallel=8, weight_dtype="fp8", calibration=name), [64], [1024]
        )[1]
        for name in ("auto", "none")
    )
    assert calibrated[0]["tpot_ms"] == pytest.approx(plain[0]["tpot_ms"], rel=0.3)


def test_int4_experts_run_as_bf16():
    full, missing = completed(for_gpu("h200"), hardware.gpu("h200"), "int4")
    assert full.experts["int4"] == full.experts["bf16"] and "experts int4" in missing


def test_rows_that_memory_could_not_read():
    """1,000 us for 64 experts x 3 x 4,096 x 1,024 x 2 bytes is 1.6 TB/s; 300 us would be 5.4 TB/s on 4.8."""
    row = {"tokens": 64, "hidden": 4096, "intermediate": 1024, "top_k": 4, "experts": 64, "tp": 1, "ep": 1}
    table = pl.DataFrame([row | {"us": 1000.0}, row | {"hidden": 4097, "us": 300.0}])
    found = measurements.too_fast(table, hardware.gpu("h200"), 2.0)
    assert found.rows() == [(4097, 1024, 4, 64)]


def test_calibrations_say_which_fp8_they_know():
    for calibration in shipped().values():
        assert ("fp8" in calibration.experts) == any("blocks of 128 x 128" in note for note in calibration.notes)
