"""What all terms of the cost model share: positive parameters, and two ways of joining times."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Positive(nn.Module):
    """A module whose constants are positive by construction: their logarithms are what is stored and fitted."""

    def __init__(self, constants: Mapping[str, float]) -> None:
        super().__init__()
        self.log_parameters = nn.ParameterDict(
            {
                name: nn.Parameter(torch.tensor(max(value, 1e-12), dtype=torch.float64).log())
                for name, value in constants.items()
            }
        )
        self.shifts: dict[str, Tensor] = {}
        """Added to logarithms of constants while somebody asks what they are worth (`elasticity.slowed`)."""

    def parameter(self, name: str) -> Tensor:
        """One constant, in the unit that its name says."""
        logarithm: Tensor = self.log_parameters[name]
        return (logarithm + self.shifts[name] if name in self.shifts else logarithm).exp()

    def constants(self) -> dict[str, float]:
        """All constants as numbers."""
        return {name: float(value.detach().exp()) for name, value in self.log_parameters.items()}


def joined(first: Tensor, second: Tensor, sharpness: Tensor) -> Tensor:
    """(first^p + second^p)^(1/p): the larger of two times that overlap, rounded where they are alike. p is `sharpness`, at least 1:
    two times never take longer than one after the other.
    """
    sharpness = sharpness.clamp(min=1.0)
    larger = torch.maximum(first, second).clamp(min=1e-30)
    return larger * ((first / larger) ** sharpness + (second / larger) ** sharpness) ** (1.0 / sharpness)


def share_between(value: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """0 up to `low`, 1 from `high` on, linear between them."""
    return ((value - low) / (high - low)).clamp(0.0, 1.0)
