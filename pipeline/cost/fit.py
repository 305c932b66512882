"""Fitting the terms to operator timings by gradient descent, and measuring the error on what was held out.

Every term is fitted alone, on logarithms: the loss is the mean of |log(law / measured)|, smoothed near zero and capped where a
single row is far off (a kernel that an engine would not choose). Splits hold whole shapes out, never random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from pipeline.cost.terms import Positive
from schemas.calibration import HeldOut

Law = Callable[[], Tensor]
"""Microseconds of the rows that are fitted, from the module's present constants."""

CAP = 0.7
"""Beyond a factor of two a row pulls no harder."""


def descend(
    module: Positive,
    law: Law,
    measured_us: Tensor,
    *,
    weights: Tensor | None = None,
    steps: int = 600,
    rate: float = 0.05,
    fixed: Sequence[str] = (),
) -> float:
    """Fit the module's constants in place (Adam on their logarithms); returns the final loss. Deterministic."""
    free = [parameter for name, parameter in module.log_parameters.items() if name not in fixed]
    optimiser = torch.optim.Adam(free, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    target = measured_us.log()
    weight = torch.ones_like(target) if weights is None else weights
    best = (float("inf"), [parameter.detach().clone() for parameter in free])
    for _ in range(steps):
        optimiser.zero_grad()
        error = law().log() - target
        smooth = torch.sqrt(error**2 + 1e-4)
        loss = (weight * (CAP * torch.tanh(smooth / CAP))).sum() / weight.sum()
        if loss.item() < best[0]:
            best = (loss.item(), [parameter.detach().clone() for parameter in free])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        for parameter, value in zip(free, best[1], strict=True):
            parameter.copy_(value)
    return best[0]


def held_out(part: str, split: str, predicted_us: Tensor, measured_us: Tensor) -> HeldOut:
    """The errors of rows that were not fitted."""
    error = (predicted_us / measured_us - 1.0).abs().detach().numpy()
    return HeldOut(
        part=part,
        split=split,
        rows=int(error.shape[0]),
        median=round(float(np.median(error)), 4),
        p95=round(float(np.quantile(error, 0.95)), 4),
    )


def every_other(keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """True for the rows whose key (a row of `keys`) is in the half that is fitted; the same half every time."""
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    fitted = np.zeros(distinct.shape[0], bool)
    fitted[np.random.default_rng(seed).permutation(distinct.shape[0])[: (distinct.shape[0] + 1) // 2]] = True
    chosen: np.ndarray = fitted[place.ravel()]
    return chosen


def column(table: pl.DataFrame, name: str) -> Tensor:
    """A table's column as float64."""
    return torch.tensor(table[name].to_numpy(), dtype=torch.float64)


MOST_ROWS = 4000
"""Rows that one fit descends on."""


def thinned(table: pl.DataFrame) -> pl.DataFrame:
    """Every n-th row, so that about MOST_ROWS are left."""
    return table.gather_every(max(1, table.height // MOST_ROWS))


def rounded(module: Positive) -> dict[str, float]:
    """A fitted module's constants as they are written: five digits."""
    values = {name: float(f"{value:.5g}") for name, value in module.constants().items()}
    return values | ({"sharpness": max(1.0, values["sharpness"])} if "sharpness" in values else {})
