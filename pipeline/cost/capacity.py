"""How many KV blocks fit: what is left of a GPU's memory after everything else, by item.

vLLM measures the peak of a profiling run; here activations are computed from the same worst case, a full token budget
(`max_batched_tokens`) and logits for every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.drafter import Drafter
from pipeline.cost.stages import Stage, stages_of
from schemas import hardware
from schemas.errors import CapacityError
from schemas.hardware import GIB
from schemas.study import Scenario

RESERVE_GIB = 1.0
"""CUDA context, NCCL buffers, CUDA graphs: outside the engine's own accounting. Order of magnitude, not measured here."""


@dataclass(frozen=True)
class KvCapacity:
    """The memory of one rank by item, GiB, and the pool that remains. All ranks of a stage hold the same; with several pipeline
    stages this is the one with the least room, which vLLM gives to all.
    """

    usable_gib: float
    weights_gib: float
    draft_weights_gib: float
    activations_gib: float
    reserve_gib: float
    kv_gib: float
    block_tokens: int
    kv_bytes_per_token: float  # per rank, drafter included
    pool_blocks: int

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool of one replica holds."""
        return self.pool_blocks * self.block_tokens


def kv_capacity(scenario: Scenario, drafter: Drafter | None) -> KvCapacity:
    """The KV pool of one replica. Raises CapacityError, with the sum, where the model does not fit."""
    return min(_stage_capacities(scenario, drafter), key=lambda stage: stage.pool_blocks)


def _stage_capacities(scenario: Scenario, drafter: Drafter | None) -> list[KvCapacity]:
    """Of each pipeline stage; a drafter is with the last one. Raises CapacityError."""
    fleet, engine, served = scenario.fleet, scenario.engine, scenario.model
    gpu, model = hardware.gpu(fleet.gpu), hardware.model(served.name)
    usable = gpu.memory_gib * engine.gpu_memory_utilization
    found = []
    for stage in stages_of(model, fleet.pipeline_parallel):
        mine = drafter if stage.last else None
        weights = stage.weight_bytes(served.weight_dtype, fleet.tensor_parallel) / GIB
        draft_weights = 0.0 if mine is None else mine.weight_bytes / GIB
        activations = _activation_bytes(stage, scenario, drafter) / GIB
        left = usable - weights - draft_weights - activations - RESERVE_GIB
        per_token = stage.model.kv_bytes_per_token(served.kv_dtype, fleet.tensor_parallel)
        all_per_token = per_token + (0 if mine is None else mine.kv_bytes_per_token)
        blocks = int(left * GIB // (all_per_token * engine.block_tokens))
        if blocks < 1:
            items = f"weights {weights:.1f}, activations {activations:.1f}, reserve {RESERVE_GIB:.1f}"
            if mine is not None:
                items += f", draft weights {draft_weights:.1f}"
            raise CapacityError(
                f"{served.name} ({served.weight_dtype}) does not fit {fleet.gpus_per_replica} x {gpu.name}: "
                f"{usable:.1f} GiB usable per GPU, {items} GiB",
                mend="raise tensor_parallel, choose a smaller weight_dtype, or another GPU",
            )
        found.append(
            KvCapacity(
                usable_gib=usable,
                weights_gib=weights,
                draft_weights_gib=draft_weights,
                activations_gib=activations,
                reserve_gib=RESERVE_GIB,
                kv_gib=blocks * engine.block_tokens * all_per_token / GIB,
                block_tokens=engine.block_tokens,
                kv_bytes_per_token=all_per_token,
                pool_blocks=blocks,
            )
        )
    return found


def _activation_bytes(stage: Stage, scenario: Scenario, drafter: Drafter | None) -> float:
    """Peak of one pass: residual and normed states, the widest MLP intermediate, and with the LM head float32 logits twice (raw,
    softmax).
    """
    model, tp = stage.model, scenario.fleet.tensor_parallel
    width = model.intermediate if model.moe is None else model.moe.expert_intermediate * model.moe.experts_per_token
    per_token = (4 * model.hidden + 3 * width / tp) * 2
    positions = scenario.engine.max_sequences * (1 + (0 if drafter is None else drafter.passes)) if stage.last else 0
    return scenario.engine.max_batched_tokens * per_token + positions * model.vocab * 4.0 * 2
