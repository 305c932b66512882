"""What each kind of constant is worth: elasticities by autograd, and a cost model with kinds of constants scaled.

A step is made of sums, maxima and p-norms of times and of bytes or FLOPs over rates, so it is homogeneous of degree one: 1 %
slower in everything is 1 % longer. Hence the elasticities of a step to times, minus those to rates, add up to one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipeline.cost.model import StepCostModel
from pipeline.cost.terms import Positive

KINDS: dict[str, tuple[str, int]] = {
    "bandwidth_gb_s": ("memory_bandwidth", -1),
    "cached_gb_s": ("memory_bandwidth", -1),
    "tflops": ("flops", -1),
    "unit_us": ("flops", +1),  # arithmetic of a tile of attention, given as its time
    "link_gb_s": ("link_bandwidth", -1),
    "latency_us": ("link_latency", +1),
    "block_us": ("thread_blocks", +1),
    "empty_us": ("thread_blocks", +1),
    "query_us": ("thread_blocks", +1),
    "wave_us": ("thread_blocks", +1),
    "token_us": ("thread_blocks", +1),
    "row_us": ("thread_blocks", +1),
    "launch_us": ("launches", +1),
    "offset_us": ("launches", +1),
    "step_us": ("host", +1),
    "sequence_us": ("host", +1),
    "draft_pass_us": ("host", +1),
}
"""The kind of every constant that has a unit, and whether it is a rate (-1) or a time (+1)."""

RATIOS = frozenset(
    {
        "half_tile", "quarter_tile", "sharpness", "extra_inputs", "quantised", "spill_low", "spill_high", "spill_width", "stall",
        "tile_rows",
    }
)  # fmt: skip
"""Constants without a unit: no machine is faster or slower by them."""

RATE_KINDS = ("memory_bandwidth", "flops", "link_bandwidth")
TIME_KINDS = ("link_latency", "thread_blocks", "launches", "host")

LIMITS: dict[str, tuple[str, ...]] = {
    "memory bandwidth": ("memory_bandwidth",),
    "FLOP/s": ("flops",),
    "interconnect": ("link_bandwidth", "link_latency"),
    "thread blocks": ("thread_blocks",),
    "launches": ("launches",),
    "host": ("host",),
}
"""What a step can be bound by: the kinds that belong together."""


ALL_KINDS = (*RATE_KINDS, *TIME_KINDS)


def kind_of(parameter: str) -> tuple[str, int] | None:
    """(kind, -1 for a rate or +1 for a time) of a parameter of the module by its full name; None for a ratio."""
    constant = parameter.rsplit(".", 1)[-1]
    return None if constant in RATIOS else KINDS[constant]


def slowed(model: StepCostModel, features: Tensor, slowness: Mapping[str, Tensor]) -> Tensor:
    """[steps] seconds with every constant of a kind exp(slowness) slower, each kind by its own; kinds not named stay."""
    terms = [module for module in model.modules() if isinstance(module, Positive)]
    try:
        for term in terms:
            kinds = {name: kind_of(name) for name in term.log_parameters}
            term.shifts = {
                name: kind[1] * slowness[kind[0]]
                for name, kind in kinds.items()
                if kind is not None and kind[0] in slowness
            }
        seconds: Tensor = model(features)
    finally:
        for term in terms:
            term.shifts = {}
    return seconds.sum(dim=-1)


def slowness_gradients(model: StepCostModel, scalar: Tensor) -> dict[str, float]:
    """D scalar / d slowness of each kind, by reverse-mode autograd; the scalar's graph is kept. In the scalar's unit, none negative
    for a time.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
    sums = dict.fromkeys(ALL_KINDS, 0.0)
    for name, gradient in zip(names, gradients, strict=True):
        kind = kind_of(name)
        if gradient is not None and kind is not None:
            sums[kind[0]] += kind[1] * gradient.item()
    return sums


CHUNK = 1 << 16
"""Steps whose graph is held at once: about 200 MB."""


def step_gradients(model: StepCostModel, features: Tensor, kinds: tuple[str, ...] = ALL_KINDS) -> tuple[Tensor, Tensor]:
    """([steps] seconds, [steps, len(kinds)] d seconds / d slowness of each kind), by forward-mode autograd."""
    seconds, gradients = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, len(kinds), dtype=torch.float64)]
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    with torch.no_grad(), forward_ad.dual_level():
        for first in range(0, features.shape[0], CHUNK):
            chunk = features[first : first + CHUNK]
            columns = []
            for kind in kinds:
                slowness = forward_ad.make_dual(zero, one)  # type: ignore[no-untyped-call]
                value, gradient = forward_ad.unpack_dual(slowed(model, chunk, {kind: slowness}))  # type: ignore[no-untyped-call]
                columns.append(torch.zeros_like(value) if gradient is None else gradient)
            seconds.append(value)
            gradients.append(torch.stack(columns, dim=-1))
    return torch.cat(seconds), torch.cat(gradients)


def elasticities(model: StepCostModel, seconds: Tensor) -> dict[str, float]:
    """Of one step: d log(seconds) / d log(speed) for each of RATE_KINDS, d log(seconds) / d log(time) for each of TIME_KINDS.

    `seconds`: a scalar of the module with its graph, which is kept.
    """
    slower = slowness_gradients(model, seconds.log())
    return {kind: -value if kind in RATE_KINDS else value for kind, value in slower.items()}


def shares(by_kind: dict[str, float]) -> dict[str, float]:
    """The share of a step that each limit makes, from its elasticities; they add up to 1."""
    return {
        limit: sum(-by_kind[kind] if kind in RATE_KINDS else by_kind[kind] for kind in kinds)
        for limit, kinds in LIMITS.items()
    }
