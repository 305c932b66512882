"""The routed experts of a mixture-of-experts layer on one rank.

    time = launch + joined(memory, arithmetic) + token_us * tokens
    memory = (distinct experts * weights * bytes + activations of every visit) / bandwidth
    arithmetic = 2 distinct ceil(visits per distinct expert / tile_rows) tile_rows weights / FLOP/s

`tokens` visit `E (1 - (1 - k / E)^tokens)` distinct experts when routing is uniform, each read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.cost.shapes import ACTIVATION_BYTES, Experts
from pipeline.cost.terms import Positive, joined
from schemas.calibration import ExpertsTerm


class MixtureOfExperts(Positive):
    """The law with one dtype's constants."""

    def __init__(self, term: ExpertsTerm) -> None:
        super().__init__(term.model_dump())

    def seconds(self, experts: Experts, tokens: Tensor) -> Tensor:
        """One layer."""
        return 1e-6 * self.law_us(
            tokens, experts.experts, experts.per_token, experts.params, experts.hidden, experts.bytes_per_weight
        )

    def law_us(
        self,
        tokens: Tensor,
        experts: Tensor | float,
        per_token: Tensor | float,
        params: Tensor | float,
        hidden: Tensor | float,
        bytes_per_weight: float,
    ) -> Tensor:
        """Microseconds; tensors broadcast. `params`: weights of one expert on this rank."""
        visits = tokens * per_token
        distinct = torch.minimum(visits, experts * (1.0 - (1.0 - per_token / experts) ** tokens)).clamp(min=1e-9)
        width = params / (3.0 * hidden)  # of the gated MLP on this rank
        activations = ACTIVATION_BYTES * visits * (2.0 * hidden + 3.0 * width)
        memory = (params * bytes_per_weight * distinct + activations) / (self.parameter("bandwidth_gb_s") * 1e3)
        tile = self.parameter("tile_rows")
        tiles = torch.ceil(visits / distinct / tile)
        arithmetic = 2.0 * distinct * tiles * tile * params / (self.parameter("tflops") * 1e6)
        overlapped = joined(memory, arithmetic, self.parameter("sharpness"))
        return self.parameter("launch_us") + overlapped + self.parameter("token_us") * tokens
