"""The routed experts of a mixture-of-experts layer on one rank.

    time = launch + joined(memory, arithmetic) + token_us * tokens
    memory = (distinct experts * weights * bytes + activations of every visit) / bandwidth
    arithmetic = 2 distinct ceil(visits per distinct expert / tile_rows) tile_rows weights / FLOP/s

A visit is one token at one of its k experts. Under tensor parallelism every rank has a slice of each expert and sees all visits.
Under expert parallelism over n ranks (vLLM's enable_expert_parallel without data parallelism) a rank has E / n whole experts, is
given all tokens, computes the visits of its own experts and pads the outputs of the others with zeros before the all-reduce:
weights and FLOPs count what is its own, activations all visits. The layer waits for its busiest rank (`uniform`).

Sources: vLLM `fused_moe/layer.py` (experts divided over the tensor-parallel group, `expert_map`, one all-reduce) and
docs.vllm.ai/en/latest/serving/expert_parallel_deployment; timings: NVIDIA AIConfigurator, tp and ep up to 8.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.cost.shapes import ACTIVATION_BYTES, Experts
from pipeline.cost.terms import Positive, joined
from schemas.calibration import ExpertsTerm


class Load(NamedTuple):
    """What one layer's experts on one rank get to do."""

    visits: Tensor  # token-expert pairs computed here
    distinct: Tensor  # experts of this rank that at least one token visits


def uniform(tokens: Tensor, experts: float, per_token: float, ranks: int) -> Load:
    """The busiest of `ranks` ranks when each token picks k of E experts at random, each choice as likely as any other.

    With m = E / n experts on a rank, q = (1 - k/E)^t the chance that nobody visits one, q2 that nobody visits either of two, and
    c the expected maximum of n standard normals (0 for one rank):

        visits = t k / n + c sqrt(t k / n (E - k) / (E - 1))
        distinct = m (1 - q) + c sqrt(m (q - q2))

    The roots are standard deviations, less what ranks have in common (the sum over all ranks is fixed), so the maximum is that of
    independent normals. Exact for one rank; against drawing, see the tests. Real routing is more skewed: a floor.
    """
    here = experts / ranks
    most = maximum_of_normals(ranks)
    visits = tokens * per_token / ranks
    missed = (1.0 - per_token / experts) ** tokens
    distinct = here * (1.0 - missed)
    if ranks > 1:
        pair_missed = (
            max(0.0, (experts - per_token) * (experts - per_token - 1)) / (experts * (experts - 1))
        ) ** tokens
        visits = visits + most * (visits * (experts - per_token) / (experts - 1)).sqrt()
        # no gradient flows into the root: constants have no part in it
        distinct = distinct + most * (here * (missed - pair_missed)).clamp(min=0.0).sqrt()
        visits = torch.minimum(visits, tokens * min(per_token, here))
        distinct = distinct.clamp(max=here)
    return Load(visits, torch.minimum(distinct, visits).clamp(min=1e-9))


def balanced(tokens: Tensor, experts: Tensor, per_token: Tensor, ranks: Tensor) -> Load:
    """As timings are made: visits dealt out evenly over all experts and ranks, so t k of E experts until all are visited."""
    visits = tokens * per_token
    return Load(visits / ranks, (torch.minimum(visits, experts) / ranks).clamp(min=1e-9))


@cache
def maximum_of_normals(count: int) -> float:
    """Expected maximum of `count` independent standard normals: integral of x d Phi(x)^n. 2: 1/sqrt(pi), 8: 1.4236."""
    x = np.linspace(-9.0, 9.0, 36_001)
    below = np.array([0.5 * (1.0 + math.erf(each / math.sqrt(2.0))) for each in x]) ** count
    return float(((x[1:] + x[:-1]) / 2 * np.diff(below)).sum()) if count > 1 else 0.0


class MixtureOfExperts(Positive):
    """The law with one dtype's constants."""

    def __init__(self, term: ExpertsTerm) -> None:
        super().__init__(term.model_dump())

    def seconds(self, experts: Experts, tokens: Tensor) -> Tensor:
        """One layer, on the busiest rank."""
        load = uniform(tokens, experts.experts, experts.per_token, experts.ranks)
        visits = tokens * experts.per_token
        us = self.law_us(tokens, load, visits, experts.params, experts.hidden, experts.width, experts.bytes_per_weight)
        return 1e-6 * us

    def law_us(
        self,
        tokens: Tensor,
        load: Load,
        all_visits: Tensor,
        params: Tensor | float,
        hidden: Tensor | float,
        width: Tensor | float,
        bytes_per_weight: float,
    ) -> Tensor:
        """Microseconds; tensors broadcast. `params`: weights of one expert on this rank; `width`: of its MLP there."""
        activations = ACTIVATION_BYTES * all_visits * (2.0 * hidden + 3.0 * width)
        memory = (params * bytes_per_weight * load.distinct + activations) / (self.parameter("bandwidth_gb_s") * 1e3)
        tile = self.parameter("tile_rows")
        tiles = torch.ceil(load.visits / load.distinct / tile)
        arithmetic = 2.0 * load.distinct * tiles * tile * params / (self.parameter("tflops") * 1e6)
        overlapped = joined(memory, arithmetic, self.parameter("sharpness"))
        return self.parameter("launch_us") + overlapped + self.parameter("token_us") * tokens
