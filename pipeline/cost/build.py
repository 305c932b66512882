"""From a scenario to everything the replay needs to know of its hardware: cost model, lowered cost, KV capacity."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.capacity import KvCapacity, kv_capacity
from pipeline.cost.drafter import Drafter, drafter_of
from pipeline.cost.lowered import LoweredCost, lower
from pipeline.cost.model import StepCostModel
from pipeline.cost.shapes import rank_shapes
from schemas import hardware
from schemas.errors import CatalogError
from schemas.study import Engine, Scenario


@dataclass(frozen=True)
class Hardware:
    """A scenario's hardware, resolved."""

    cost_model: StepCostModel
    lowered: LoweredCost
    capacity: KvCapacity
    drafter: Drafter | None


def graph_sizes(engine: Engine, drafts: int) -> tuple[int, ...]:
    """Token counts for which the engine captured CUDA graphs, ascending.

    `vllm`: 1, 2, 4, every 8 up to 256 and every 16 up to 512, as far as twice the most tokens of a decoding batch
    (vLLM's default `cudagraph_capture_sizes`).
    """
    if engine.cuda_graph_sizes == "none":
        return ()
    if engine.cuda_graph_sizes == "vllm":
        largest = min(2 * engine.max_sequences * (1 + drafts), 512, engine.max_batched_tokens)
        return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest)
    return tuple(sorted(set(engine.cuda_graph_sizes)))


def build_hardware(scenario: Scenario) -> Hardware:
    """Resolve names, check that they fit together, build and lower the cost model.

    Raises CatalogError (unknown name, heads that can't be divided, no fp8) and CapacityError (does not fit).
    """
    gpu = hardware.gpu(scenario.fleet.gpu)
    tp = scenario.fleet.tensor_parallel
    if tp > gpu.max_tensor_parallel:
        raise CatalogError(
            f"tensor_parallel = {tp}, but {gpu.name} has {gpu.max_tensor_parallel} GPUs in one link domain",
            mend=f"use at most {gpu.max_tensor_parallel}",
        )
    served = scenario.model
    shapes = rank_shapes(hardware.model(served.name), tp, served.weight_dtype, served.kv_dtype)
    drafter = drafter_of(scenario)
    engine = scenario.engine
    passes = 0 if drafter is None else drafter.passes
    model = StepCostModel(gpu, shapes, served.weight_dtype, drafter, graph_sizes=graph_sizes(engine, passes))
    return Hardware(
        cost_model=model,
        lowered=lower(
            model,
            max_tokens=engine.max_batched_tokens,
            max_rows=engine.max_sequences,
            max_sampled=engine.max_sequences * (1 + passes),
        ),
        capacity=kv_capacity(scenario, drafter),
        drafter=drafter,
    )
