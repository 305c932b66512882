"""Fitting the terms that take little of a step: pointwise kernels, sampler, experts, all-reduce."""

from __future__ import annotations

import polars as pl
import torch
from torch import Tensor

from pipeline.cost import defaults
from pipeline.cost.experts import MixtureOfExperts
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


def fit_experts(table: pl.DataFrame, gpu: Gpu, dtype: str, errors: list[HeldOut]) -> ExpertsTerm:
    """Balanced routing, all experts on one rank."""
    keys = ["hidden", "intermediate", "top_k", "experts"]
    chosen = pl.Series(every_other(table.select(keys).to_numpy()))
    test = table.filter(~chosen)
    term = _experts_of(table.filter(chosen), gpu, dtype)
    with torch.no_grad():
        us = MixtureOfExperts(term).law_us(*_expert_columns(test), BYTES_PER_WEIGHT[dtype])
    errors.append(held_out(f"experts {dtype}", "half of the models", us, column(test, "us")))
    return _experts_of(table, gpu, dtype)


def _expert_columns(table: pl.DataFrame) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, experts, per_token, hidden = (column(table, name) for name in ("tokens", "experts", "top_k", "hidden"))
    params = 3.0 * hidden * column(table, "intermediate") / column(table, "tp")
    return tokens, experts, per_token, params, hidden


def _experts_of(table: pl.DataFrame, gpu: Gpu, dtype: str) -> ExpertsTerm:
    thin = thinned(table)
    columns, us = _expert_columns(thin), column(thin, "us")
    best: tuple[float, ExpertsTerm] | None = None
    for tile in (16.0, 64.0):  # a step function of it: tried, not descended on
        module = MixtureOfExperts(defaults.experts(gpu, dtype).model_copy(update={"tile_rows": tile}))
        loss = descend(
            module,
            lambda m=module: m.law_us(*columns, BYTES_PER_WEIGHT[dtype]),  # type: ignore[misc]
            us,
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
