"""The cost model as the replay loop wants it: tables over small integers and a few coefficients.

Everything in `StepCostModel` is a function of one integer (tokens, rows or sampled positions) or a maximum of two linear
terms. The integers index tables, evaluated by the torch module itself in one batch; the linear terms become coefficients.
So nothing is approximated: a lowered step equals the torch step to rounding (tested to 1e-6, in practice 1e-15).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cost.model import StepCostModel
from pipeline.jit import njit

Floats = NDArray[np.float64]


class LoweredCost(NamedTuple):
    """Seconds by table look-up. Index 0 of each table is a step without such tokens and is never read."""

    gemm: Floats  # [max_tokens + 1]
    communication: Floats  # [max_tokens + 1]
    sampling: Floats  # [max_sampled + 1]
    draft_first: Floats  # [max_tokens + 1], without attention and head
    draft_row: Floats  # [max_rows + 1]: the head of the first pass
    draft_later: Floats  # [max_rows + 1]: body and head of each later pass
    attention_per_pair: float
    attention_per_context: float
    draft_per_pair: float
    draft_per_context: float
    overhead_step: float
    overhead_row: float


def lower(model: StepCostModel, *, max_tokens: int, max_rows: int, max_sampled: int) -> LoweredCost:
    """Tabulate `model` for every count up to the engine's limits. Takes milliseconds."""
    with torch.no_grad():
        tokens = torch.arange(max_tokens + 1, dtype=torch.float64)
        rows = torch.arange(max_rows + 1, dtype=torch.float64)
        sampled = torch.arange(max_sampled + 1, dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        zero = torch.zeros(1, dtype=torch.float64)
        shapes = model.shapes
        nothing = np.zeros(1)
        draft_first, draft_row, draft_later, draft_per_pair, draft_per_context = nothing, nothing, nothing, 0.0, 0.0
        if model.drafter is not None:
            drafter = model.drafter.shapes
            launch = model.parameter("draft_pass_us") * 1e-6
            body = model.body_seconds(drafter, tokens) + model.allreduce_seconds(drafter, tokens)
            draft_first = (body + launch).numpy()
            head = model.head_seconds(drafter, rows)
            draft_row = head.numpy()
            later = model.body_seconds(drafter, rows) + model.allreduce_seconds(drafter, rows) + head + launch
            draft_later = later.numpy()
            draft_per_pair = model.attention_seconds(drafter, one, zero).item()
            draft_per_context = model.attention_seconds(drafter, zero, one).item()
        return LoweredCost(
            gemm=model.body_seconds(shapes, tokens).numpy(),
            communication=model.allreduce_seconds(shapes, tokens).numpy(),
            sampling=(model.head_seconds(shapes, sampled) + model.sampler_seconds(shapes, sampled)).numpy(),
            draft_first=draft_first,
            draft_row=draft_row,
            draft_later=draft_later,
            attention_per_pair=model.attention_seconds(shapes, one, zero).item(),
            attention_per_context=model.attention_seconds(shapes, zero, one).item(),
            draft_per_pair=draft_per_pair,
            draft_per_context=draft_per_context,
            overhead_step=model.parameter("step_us").item() * 1e-6,
            overhead_row=model.parameter("sequence_us").item() * 1e-6,
        )


@njit
def step_components(
    cost: LoweredCost,
    tokens: int,
    rows: int,
    sampled: int,
    prefill_pairs: float,
    prefill_context: float,
    decode_pairs: float,
    decode_context: float,
    draft_passes: int,
) -> tuple[float, float, float, float, float, float, float]:
    """Seconds of one step by component, in the order of COMPONENTS."""
    draft = 0.0
    if draft_passes > 0:
        pairs = prefill_pairs + decode_pairs
        context = prefill_context + decode_context
        attention = max(cost.draft_per_pair * pairs, cost.draft_per_context * context)
        draft = cost.draft_first[tokens] + attention + cost.draft_row[rows]
        if draft_passes > 1:
            one_each = max(cost.draft_per_pair, cost.draft_per_context) * context
            draft += (draft_passes - 1) * (cost.draft_later[rows] + one_each)
    return (
        cost.gemm[tokens],
        max(cost.attention_per_pair * prefill_pairs, cost.attention_per_context * prefill_context),
        max(cost.attention_per_pair * decode_pairs, cost.attention_per_context * decode_context),
        cost.communication[tokens],
        cost.sampling[sampled],
        draft,
        cost.overhead_step + cost.overhead_row * rows,
    )
