"""Fitting the terms that take little of a step: pointwise kernels, sampler, experts, all-reduce."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from torch import Tensor

from pipeline.cost import defaults, measurements
from pipeline.cost.experts import MixtureOfExperts, balanced
from pipeline.cost.fit import column, descend, every_other, held_out, rounded, thinned
from pipeline.cost.terms import Positive
from pipeline.cost.traffic import Traffic
from schemas.calibration import AllReduceTerm, ExpertsTerm, HeldOut, TrafficTerm
from schemas.hardware import BYTES_PER_WEIGHT, Gpu


def fit_pointwise(dense: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> TrafficTerm:
    """Norms, rotary and activation of a Llama-3.1-8B layer."""
    moved = {"layernorm": 4 * 4096 * 2.0, "rotary_emb": 2 * (32 + 8) * 128 * 2.0, "act_fn": 3 * 14336 * 2.0}
    table = dense.filter(pl.col("layer").is_in(list(moved))).with_columns(
        moved=pl.col("tokens") * pl.col("layer").replace_strict(moved)
    )
    return _traffic(table, gpu, defaults.pointwise(gpu), "pointwise kernels", errors)


def fit_sampler(per_sequence: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> TrafficTerm:
    """The sampler over a vocabulary of 128,256."""
    table = per_sequence.filter(pl.col("layer") == "sampler").with_columns(
        moved=pl.col("sequences") * 128256 * 4.0, tokens=pl.col("sequences")
    )
    return _traffic(table, gpu, defaults.sampler(gpu), "sampler", errors)


def _traffic(table: pl.DataFrame, gpu: Gpu, start: TrafficTerm, part: str, errors: list[HeldOut]) -> TrafficTerm:
    with_rows = part == "sampler"

    def fitted(rows: pl.DataFrame) -> Traffic:
        module = Traffic(start, gpu.l2_mb)
        columns = _columns(rows)
        descend(
            module,
            lambda: 1e6 * module.seconds(*columns),
            column(rows, "us"),
            steps=400,
            fixed=() if with_rows else ("row_us",),
        )
        return module

    def _columns(rows: pl.DataFrame) -> tuple[Tensor, float, Tensor | float]:
        return column(rows, "moved"), 1.0, column(rows, "tokens") if with_rows else 0.0

    chosen = pl.Series(every_other(table.select("tokens").to_numpy()))
    test = table.filter(~chosen)
    module = fitted(table.filter(chosen))
    with torch.no_grad():
        us = 1e6 * module.seconds(*_columns(test))
    errors.append(held_out(part, "half of the sizes", us, column(test, "us")))
    return TrafficTerm(**rounded(fitted(table)))


def fit_experts(table: pl.DataFrame, gpu: Gpu, dtype: str, errors: list[HeldOut], notes: list[str]) -> ExpertsTerm:
    """Visits dealt out evenly, by tensor and expert parallelism; models that read less than their rows say are left out."""
    impossible = measurements.too_fast(table, gpu, BYTES_PER_WEIGHT[dtype])
    if impossible.height:
        named = ", ".join("x".join(str(size) for size in model) for model in impossible.iter_rows())
        notes.append(
            f"experts {dtype}: left out, because they read faster than memory can (hidden x width x top-k x experts): {named}"
        )
        table = table.join(impossible, on=measurements.MODEL_KEYS, how="anti")
    chosen = pl.Series(every_other(table.select(measurements.MODEL_KEYS).to_numpy()))
    term = _experts_of(table.filter(chosen), gpu, dtype)
    for split, rows in (
        ("half of the models", table.filter(~chosen & (pl.col("ep") == 1))),
        ("of these, expert parallel", table.filter(~chosen & (pl.col("ep") > 1))),
    ):
        if rows.height:
            with torch.no_grad():
                us = _experts_us(MixtureOfExperts(term), rows, dtype)
            errors.append(held_out(f"experts {dtype}", split, us, column(rows, "us")))
    return _experts_of(table, gpu, dtype)


def note_on_scales(blocks: pl.DataFrame, matrices: pl.DataFrame | None) -> str:
    """What fp8 experts were fitted to, and how the other way of scaling them compares where both were timed."""
    note = "experts fp8: weights scaled in blocks of 128 x 128 (DeepSeek-V3, Qwen3 FP8)"
    if matrices is None:
        return note
    both = blocks.join(matrices, on=("tokens", *measurements.MODEL_KEYS, "tp", "ep"), suffix="_matrix")
    ratio = float(np.median((both["us_matrix"] / both["us"]).to_numpy()))
    return (
        f"{note}; with one scale per matrix (ModelOpt) the database's kernels take {ratio:.2g} times as long (median)"
    )


def _experts_us(module: MixtureOfExperts, table: pl.DataFrame, dtype: str) -> Tensor:
    tokens, experts, per_token, hidden, ranks = (
        column(table, name) for name in ("tokens", "experts", "top_k", "hidden", "ep")
    )
    width = column(table, "intermediate") / column(table, "tp")
    load = balanced(tokens, experts, per_token, ranks)
    return module.law_us(tokens, load, tokens * per_token, 3.0 * hidden * width, hidden, width, BYTES_PER_WEIGHT[dtype])


def _experts_of(table: pl.DataFrame, gpu: Gpu, dtype: str) -> ExpertsTerm:
    thin = thinned(table)
    best: tuple[float, ExpertsTerm] | None = None
    for tile in (16.0, 32.0, 64.0):  # a step function of it: tried, not descended on
        module = MixtureOfExperts(defaults.experts(gpu, dtype).model_copy(update={"tile_rows": tile}))
        loss = descend(
            module,
            lambda m=module: _experts_us(m, thin, dtype),  # type: ignore[misc]
            column(thin, "us"),
            steps=400,
            fixed=("tile_rows",),
        )
        if best is None or loss < best[0]:
            best = (loss, ExpertsTerm(**rounded(module)))
    assert best is not None
    return best[1]


def fit_allreduce(table: pl.DataFrame, errors: list[HeldOut]) -> dict[int, AllReduceTerm]:
    """Latency and link of each number of GPUs; every second size held out."""
    terms = {}
    predicted, measured = [], []
    for (gpus,), rows in table.group_by(["gpus"], maintain_order=True):
        ranks = int(gpus)
        moved = 2.0 * (ranks - 1) / ranks * column(rows, "bytes")
        us = column(rows, "us")
        for place in (slice(0, None, 2), slice(None)):
            module = Positive({"latency_us": 8.0, "link_gb_s": 100.0})

            def law(m: Positive = module, b: Tensor = moved, p: slice = place) -> Tensor:
                return m.parameter("latency_us") + b[p] / (m.parameter("link_gb_s") * 1e3)

            descend(module, law, us[place], steps=400)
            if place.step == 2:
                with torch.no_grad():
                    predicted.append(law(p=slice(1, None, 2)))
                measured.append(us[1::2])
        terms[ranks] = AllReduceTerm(**rounded(module))
    errors.append(held_out("allreduce", "every second size", torch.cat(predicted), torch.cat(measured)))
    return terms
