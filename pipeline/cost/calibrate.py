"""`preplay calibrate ops`: a calibration of one GPU from operator timings, part by part, with its held-out errors inside.

Each part is fitted twice: on half of the shapes, to measure the error on the other half, and then on all of them for use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from pipeline.cost import defaults, measurements
from pipeline.cost.calibrate_attention import (
    fit_decode,
    fit_decode_profile,
    fit_mixed_attention,
    fit_prefill_attention,
)
from pipeline.cost.calibrate_parts import fit_allreduce, fit_experts, fit_pointwise, fit_sampler, note_on_scales
from pipeline.cost.fit import column, descend, every_other, held_out, rounded, thinned
from pipeline.cost.gemm import Gemm
from schemas.calibration import Calibration, GemmTerm, HeldOut, Residual
from schemas.errors import InputError
from schemas.hardware import BYTES_PER_WEIGHT, Gpu

Say = Callable[[str], None]


def calibrate_operators(
    folder: Path, gpu: Gpu, database: str, profile: str | None, *, name: str, engine: str, say: Say = lambda _line: None
) -> Calibration:
    """Fit every part that `folder` has timings for. `database`, `profile`: the GPU's name in the files' names.

    Raises InputError where there are none at all.
    """
    layer = None if profile is None else measurements.layer_profile(folder, profile)
    errors: list[HeldOut] = []
    notes: list[str] = []
    gemms, experts = {}, {}
    for dtype in ("bf16", "fp8"):
        table = measurements.gemm_timings(folder, database, dtype)
        if dtype == "bf16" and layer is not None:
            # A database's matrices stand before the profile's: where both measured one, real runs agree with the database. The
            # profile alone has an LM head.
            table = measurements.with_profile(table, layer)
        if table is not None:
            say(f"gemm {dtype}: {table.height:,} timings")
            gemms[dtype] = fit_gemm(table, gpu, dtype, errors)
        moe = measurements.moe_timings(folder, database, measurements.EXPERT_FORMATS[dtype])
        if moe is not None:
            say(f"experts {dtype}: {moe.height:,} timings")
            if dtype == "fp8":
                notes.append(note_on_scales(moe, measurements.moe_timings(folder, database, "fp8")))
            experts[dtype] = fit_experts(moe, gpu, dtype, errors, notes)
    attention = decode = pointwise = sampler = None
    prefill = measurements.prefill_timings(folder, database)
    warm = measurements.decode_timings(folder, database)
    if layer is not None:
        say(f"attention: {layer['attention'].height:,} timings of mixed calls")
        attention = fit_mixed_attention(layer["attention"], gpu, errors)
        decode = fit_decode_profile(layer["attention"], gpu, errors)
        pointwise = fit_pointwise(layer["dense"], gpu, errors)
        sampler = fit_sampler(layer["per_sequence"], gpu, errors)
    elif prefill is not None:
        say(f"attention: {prefill.height:,} timings of prefill calls")
        attention = fit_prefill_attention(prefill, gpu, errors)
    if decode is None and warm is not None:
        decode = fit_decode(warm, gpu, errors)
    links = measurements.allreduce_timings(folder, database)
    allreduce = {} if links is None else fit_allreduce(links, errors)
    if not (gemms or experts or attention or decode or allreduce):
        raise InputError(
            f"no timings of '{database}' here",
            file=folder,
            mend="name the GPU as the files are named (--database, --profile)",
        )
    files = sorted(
        {file.name for file in folder.iterdir() if file.name.startswith((f"{database}_", f"llmservingsim_{profile}_"))}
    )
    return Calibration(
        name=name,
        gpu=gpu.name,
        engine=engine,
        sources=tuple(files),
        gemm=gemms,
        attention=attention,
        decode=decode,
        pointwise=pointwise,
        sampler=sampler,
        experts=experts,
        allreduce=allreduce,
        host=defaults.HOST,
        held_out=tuple(errors),
        notes=tuple(notes),
    )


def fit_gemm(table: pl.DataFrame, gpu: Gpu, dtype: str, errors: list[HeldOut]) -> GemmTerm:
    """The law and its residual; with few shapes each is held out in turn, else half of them."""
    start = defaults.gemm(gpu, dtype)
    shapes = table.select("outputs", "inputs").unique().sort("outputs", "inputs")
    if shapes.height < 20:
        predicted, measured = [], []
        for left_out in shapes.iter_rows(named=True):
            here = (pl.col("outputs") == left_out["outputs"]) & (pl.col("inputs") == left_out["inputs"])
            term = _gemm_of(table.filter(~here), gpu, dtype, start)
            predicted.append(_gemm_us(term, table.filter(here), gpu, dtype))
            measured.append(column(table.filter(here), "us"))
        errors.append(held_out(f"gemm {dtype}", "each shape in turn", torch.cat(predicted), torch.cat(measured)))
    else:
        fitted = pl.Series(every_other(table.select("outputs", "inputs").to_numpy()))
        term = _gemm_of(table.filter(fitted), gpu, dtype, start)
        test = table.filter(~fitted)
        errors.append(
            held_out(f"gemm {dtype}", "half of the shapes", _gemm_us(term, test, gpu, dtype), column(test, "us"))
        )
    return _gemm_of(table, gpu, dtype, start)


def _gemm_of(table: pl.DataFrame, gpu: Gpu, dtype: str, start: GemmTerm) -> GemmTerm:
    thin = thinned(table)
    module = Gemm(start, gpu.sms)
    tokens, outputs, inputs = (column(thin, name) for name in measurements.GEMM_KEYS)
    descend(
        module, lambda: module.law_us(tokens, outputs, inputs, BYTES_PER_WEIGHT[dtype]), column(thin, "us"), steps=500
    )
    constants = rounded(module) | {"quantised": min(1.0, module.constants()["quantised"])}
    law = Gemm(GemmTerm.model_validate(constants), gpu.sms)
    grid = np.array(sorted(table["tokens"].unique()), float)
    if grid.shape[0] > 80:  # a profile on every multiple of 16: the law's own steps are finer than a residual needs
        grid = grid[np.unique(np.linspace(0, grid.shape[0] - 1, 80).astype(int))]
    sites, logs = [], []
    for (out, into), rows in table.group_by(["outputs", "inputs"], maintain_order=True):
        with torch.no_grad():
            us = law.law_us(column(rows, "tokens"), float(out), float(into), BYTES_PER_WEIGHT[dtype]).numpy()
        left = np.log(rows["us"].to_numpy() / us)
        sites.append((float(out), float(into)))
        logs.append(tuple(np.round(np.interp(grid, rows["tokens"].to_numpy(), left), 3).tolist()))
    residual = Residual(rows=tuple(grid.tolist()), sites=tuple(sites), log=tuple(logs))
    return GemmTerm.model_validate(constants | {"residual": residual})


def _gemm_us(term: GemmTerm, table: pl.DataFrame, gpu: Gpu, dtype: str) -> Tensor:
    """Predictions in the table's order."""
    law = Gemm(term, gpu.sms)
    parts = []
    with torch.no_grad():
        for (out, into), rows in table.group_by(["outputs", "inputs"], maintain_order=True):
            tokens = column(rows, "tokens")
            us = law.law_us(tokens, float(out), float(into), BYTES_PER_WEIGHT[dtype])
            assert law.residual is not None
            parts.append(us * law.residual(float(out), float(into), tokens).exp())
    return torch.cat(parts)
