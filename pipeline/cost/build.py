"""From a scenario to everything the replay needs to know of its hardware: cost model, lowered cost, KV capacity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cost.capacity import KvCapacity, kv_capacity
from pipeline.cost.drafter import Drafter, drafter_of
from pipeline.cost.lowered import LoweredCost, lower
from pipeline.cost.model import StepCostModel
from pipeline.cost.shapes import RankShapes, rank_shapes
from pipeline.cost.stages import stage_shapes
from schemas import hardware
from schemas.calibration import Calibration, HeldOut, for_gpu, read_calibration, shipped
from schemas.errors import CatalogError
from schemas.hardware import BYTES_PER_WEIGHT
from schemas.study import Engine, Scenario


@dataclass(frozen=True)
class Hardware:
    """A scenario's hardware, resolved."""

    cost_model: StepCostModel
    lowered: LoweredCost
    capacity: KvCapacity
    drafter: Drafter | None
    stages: tuple[RankShapes, ...]  # of the pipeline, one rank of each


def calibration_of(scenario: Scenario) -> Calibration | None:
    """The calibration that the scenario names, or the shipped one of its GPU, if there is one. Raises CatalogError."""
    name, gpu = scenario.fleet.calibration, scenario.fleet.gpu
    if name == "none":
        return None
    if name == "auto":
        return for_gpu(gpu)
    if name in shipped():
        found = shipped()[name]
    elif name.endswith(".json"):
        found = read_calibration(Path(name))
    else:
        raise CatalogError(f"unknown calibration '{name}'", mend=f"known: auto, none, a file, {', '.join(shipped())}")
    if found.gpu != gpu:
        raise CatalogError(f"calibration {found.name} is for {found.gpu}, not {gpu}", mend="use 'auto'")
    return found


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

    Raises CatalogError (unknown name, heads, experts or layers that can't be divided, no fp8) and CapacityError (does not fit).
    """
    gpu = hardware.gpu(scenario.fleet.gpu)
    tp = scenario.fleet.tensor_parallel
    if tp > gpu.max_tensor_parallel:
        raise CatalogError(
            f"tensor_parallel = {tp}, but {gpu.name} has {gpu.max_tensor_parallel} GPUs in one link domain",
            mend=f"use at most {gpu.max_tensor_parallel}",
        )
    served = scenario.model
    parallel = scenario.fleet.expert_parallel
    target = hardware.model(served.name)
    stages = stage_shapes(
        target,
        gpu,
        tensor_parallel=tp,
        stages=scenario.fleet.pipeline_parallel,
        weight_dtype=served.weight_dtype,
        kv_dtype=served.kv_dtype,
        expert_parallel=parallel,
    )
    whole = rank_shapes(target, tp, served.weight_dtype, served.kv_dtype, expert_parallel=parallel)
    shapes = replace(whole, hops=(sum(stage.hops[0] for stage in stages), sum(stage.hops[1] for stage in stages)))
    drafter = drafter_of(scenario)
    engine = scenario.engine
    passes = 0 if drafter is None else drafter.passes
    calibration = calibration_of(scenario)
    model = StepCostModel(gpu, shapes, served.weight_dtype, drafter, calibration, graph_sizes(engine, passes))
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
        stages=stages,
    )


def provenance(hardwares: Iterable[Hardware]) -> str:
    """What the constants of these cost models rest on, in one sentence: the report's badge."""
    seen: dict[str, None] = {}
    for built in hardwares:
        model = built.cost_model
        calibration = model.calibration
        if not calibration.sources:
            seen[f"{model.gpu.name} not calibrated: data-sheet peaks at the shares that calibrated GPUs reach"] = None
            continue
        used = [each for each in calibration.held_out if _measures(each, model)]
        worst = max(used, key=lambda each: each.median, default=None)
        text = f"{model.gpu.name} calibrated from operator timings ({calibration.name}"
        if worst is not None:
            text += f"; held-out median errors up to {worst.median:.1%}, of {worst.part.split(',')[0]}"
        defaults = [part for part in model.missing if _matters(part, model)]
        text += ")" if not defaults else f"), defaults for {', '.join(defaults)}"
        seen[text] = None
    return "; ".join(seen)


def notes_of(hardwares: Iterable[Hardware]) -> tuple[str, ...]:
    """What the calibrations say about themselves that takes part in these steps, each note once, after its GPU's name."""
    seen: dict[str, None] = {}
    for built in hardwares:
        model = built.cost_model
        for note in model.calibration.notes:
            if _takes_part(note.partition(":")[0], model):
                seen[f"{model.gpu.name}, {note}"] = None
    return tuple(seen)


def _measures(held: HeldOut, model: StepCostModel) -> bool:
    """Whether a held-out error is of something that takes part in this model's steps."""
    if held.split.endswith("expert parallel") and (model.shapes.experts is None or model.shapes.experts.ranks == 1):
        return False
    return _takes_part(held.part, model)


def _takes_part(part: str, model: StepCostModel) -> bool:
    """Whether 'experts fp8', 'gemm bf16', 'allreduce' take part in this model's steps; everything else does."""
    kind, _, dtype = part.partition(" ")
    if kind == "experts" and dtype in BYTES_PER_WEIGHT:
        return model.shapes.experts is not None and dtype == model.weight_dtype
    if kind == "gemm" and dtype in BYTES_PER_WEIGHT:
        return dtype in (model.weight_dtype, "bf16")
    return kind != "allreduce" or model.shapes.allreduces > 0


def _matters(part: str, model: StepCostModel) -> bool:
    """Whether a missing part takes part in this model's steps."""
    if part.startswith("experts"):
        return model.shapes.experts is not None and part.endswith(model.weight_dtype)
    return part != "allreduce" or model.shapes.allreduces > 0
