"""Kernels that only move data: norms, rotary embedding, activation, sampling.

    time = launches * joined(launch, bytes / bandwidth) + row_us * rows

with the bandwidth of the L2 cache while the data of one kernel fits it (up to `spill_low` times its size), of memory when it is
larger than that by `spill_width`, and the share in between. Small kernels take as long as a launch.
"""

from __future__ import annotations

from torch import Tensor

from pipeline.cost.terms import Positive, joined, share_between
from schemas.calibration import TrafficTerm


class Traffic(Positive):
    """The law with one family's constants on a GPU with so much L2."""

    def __init__(self, term: TrafficTerm, l2_mb: float) -> None:
        super().__init__(term.model_dump())
        self.l2_bytes = l2_mb * 1e6

    def seconds(self, moved: Tensor, launches: float, rows: Tensor | float = 0.0) -> Tensor:
        """`launches` kernels that move `moved` bytes each."""
        low = self.parameter("spill_low")
        spilled = share_between(moved / self.l2_bytes, low, low + self.parameter("spill_width"))
        per_byte = spilled / self.parameter("bandwidth_gb_s") + (1.0 - spilled) / self.parameter("cached_gb_s")
        launch = self.parameter("launch_us").expand(moved.shape)
        us = launches * joined(launch, moved * per_byte * 1e-3, self.parameter("sharpness"))
        return (us + self.parameter("row_us") * rows) * 1e-6
