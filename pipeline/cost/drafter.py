"""What a drafter adds to a step and to memory: its shapes on one rank, its weights, its KV cache.

A drafter is costed by its own passes, never by a ratio of layers: its LM head and its launches dominate
(vllm-project/vllm#20780: 0.74 ms per EAGLE draft where a 1/32 share of the target would be 0.22 ms).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.shapes import RankShapes, rank_shapes
from schemas import hardware
from schemas.study import DraftModel, Eagle, Scenario


@dataclass(frozen=True)
class Drafter:
    """A chain drafter on one rank: `passes` sequential passes per step, its weights and KV beside the target's."""

    shapes: RankShapes
    passes: int
    weight_bytes: float  # per rank
    kv_bytes_per_token: float  # per rank
    drops_last_hit_block: bool  # its KV of token i depends on token i + 1 (vLLM, EAGLE and MTP)


def drafter_of(scenario: Scenario) -> Drafter | None:
    """The scenario's drafter, None without speculation. Raises CatalogError for an unknown draft model."""
    tp = scenario.fleet.tensor_parallel
    spec = scenario.speculation
    served = scenario.model
    if isinstance(spec, Eagle):
        target = hardware.model(served.name)
        parallel = scenario.fleet.expert_parallel
        shapes = rank_shapes(
            target, tp, served.weight_dtype, served.kv_dtype, layers=spec.layers, expert_parallel=parallel
        )
        fusion = 2 * target.hidden * target.hidden  # token embedding and hidden state to one hidden state
        body = sum(each.inputs * each.outputs * each.count * each.bytes_per_weight for each in shapes.matrices)
        if shapes.experts is not None:
            experts = shapes.experts
            body += experts.experts / experts.ranks * experts.params * experts.layers * experts.bytes_per_weight
        return Drafter(
            shapes,
            spec.k,
            body + fusion * 2.0 / tp,
            _kv_bytes(shapes),
            drops_last_hit_block=True,
        )
    if isinstance(spec, DraftModel):
        draft = hardware.model(spec.model)
        parallel = scenario.fleet.expert_parallel and draft.moe is not None
        shapes = rank_shapes(draft, tp, "bf16", served.kv_dtype, expert_parallel=parallel)
        weights = draft.weight_bytes("bf16", tp)
        return Drafter(shapes, spec.k, weights, _kv_bytes(shapes), drops_last_hit_block=False)
    return None


def _kv_bytes(shapes: RankShapes) -> float:
    """Of one token, all layers."""
    windowed = 0 if shapes.window_attention is None else shapes.window_attention.layers
    return shapes.attention.kv_bytes * (shapes.attention.layers + windowed)
