"""Matrix multiplication: `tokens x inputs` times `inputs x outputs`.

    time = launch + joined(memory, arithmetic)
    memory = (inputs * outputs * bytes_per_weight + 2 tokens (inputs + outputs)) / bandwidth
    arithmetic = least over tile shapes: waves * 2 bm bn (inputs + extra_inputs) / (FLOP/s of one SM * efficiency of the tile)
    waves = tiles / SMs, of which the share `quantised` is rounded up; tiles = ceil(tokens / bm) ceil(outputs / bn)

Tiles of 256 x 128 are the measure; smaller ones reuse less of what they load and are less efficient, but fit small problems
better: that is where the steps in the measurements come from. What the law leaves over at measured shapes is interpolated:
over (log outputs, log inputs) by inverse distance to the fourth power, over tokens linearly. Source of the data: see the
calibration. A worked number: docs/cost-model.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.cost.shapes import ACTIVATION_BYTES, Matrix
from pipeline.cost.terms import Positive, joined
from schemas.calibration import GemmTerm, Residual

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows x columns of the result that one thread block computes, as in cuBLAS and CUTLASS."""


class Gemm(Positive):
    """The law with one dtype's constants on a GPU of `sms` multiprocessors."""

    def __init__(self, term: GemmTerm, sms: int) -> None:
        super().__init__({name: getattr(term, name) for name in GemmTerm.model_fields if name != "residual"})
        self.sms = sms
        self.residual = None if term.residual is None else ShapeResidual(term.residual)

    def seconds(self, matrix: Matrix, tokens: Tensor) -> Tensor:
        """One multiplication; `tokens` of any shape, at least 1 where it counts."""
        us = self.law_us(tokens, matrix.outputs, matrix.inputs, matrix.bytes_per_weight)
        if self.residual is not None:
            us = us * self.residual(matrix.outputs, matrix.inputs, tokens).exp()
        return us * 1e-6

    def law_us(
        self, tokens: Tensor, outputs: Tensor | float, inputs: Tensor | float, bytes_per_weight: float
    ) -> Tensor:
        """Microseconds without the residual; tensors broadcast."""
        moved = inputs * outputs * bytes_per_weight + ACTIVATION_BYTES * tokens * (inputs + outputs)
        memory = moved / (self.parameter("bandwidth_gb_s") * 1e3)
        return self.parameter("launch_us") + joined(
            memory, self._arithmetic_us(tokens, outputs, inputs), self.parameter("sharpness")
        )

    def _arithmetic_us(self, tokens: Tensor, outputs: Tensor | float, inputs: Tensor | float) -> Tensor:
        half, quarter = self.parameter("half_tile"), self.parameter("quarter_tile")
        quantised = self.parameter("quantised").clamp(max=1.0)
        per_sm = self.parameter("tflops") * 1e6 / self.sms
        columns = torch.as_tensor(outputs, dtype=torch.float64)
        least: Tensor | None = None
        for rows, width in TILES:
            area = rows * width
            if area >= 256 * 128:
                efficiency = torch.ones((), dtype=torch.float64)
            elif area >= 128 * 128:
                efficiency = half
            elif area >= 128 * 64:
                efficiency = quarter
            else:
                efficiency = quarter * quarter / half
            tiles = torch.ceil(tokens / rows) * torch.ceil(columns / width)
            waves = tiles / self.sms
            waves = torch.clamp(quantised * torch.ceil(waves) + (1.0 - quantised) * waves, min=1.0)
            us = waves * 2.0 * area * (inputs + self.parameter("extra_inputs")) / (per_sm * efficiency)
            least = us if least is None else torch.minimum(least, us)
        assert least is not None
        return least


class ShapeResidual:
    """log(measured / law) between measured shapes and token counts; beyond the measured tokens the nearest one's."""

    def __init__(self, residual: Residual) -> None:
        self.tokens = torch.tensor(residual.rows, dtype=torch.float64)
        self.sites = torch.tensor(residual.sites, dtype=torch.float64).log()
        self.log = torch.tensor(residual.log, dtype=torch.float64)

    def __call__(self, outputs: float, inputs: float, tokens: Tensor) -> Tensor:
        """Of one shape, at each of `tokens`."""
        here = torch.tensor([outputs, inputs], dtype=torch.float64).log()
        weight = (((self.sites - here) ** 2).sum(-1) + 1e-6) ** -2
        at_shape = (weight @ self.log) / weight.sum()
        clamped = tokens.clamp(float(self.tokens[0]), float(self.tokens[-1])).contiguous()
        right = torch.searchsorted(self.tokens, clamped).clamp(1, self.tokens.numel() - 1)
        low, high = self.tokens[right - 1], self.tokens[right]
        share = (clamped - low) / (high - low)
        return at_shape[right - 1] * (1.0 - share) + at_shape[right] * share
