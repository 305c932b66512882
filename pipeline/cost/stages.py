"""Pipeline parallelism: which layers a stage has, and how often a sequence gets a token.

A pass goes through the stages one after the other, with a send of hidden states between two; its time is the sum. With as many
batches in flight as there are stages, each comes round once every

    round = max(pass, stages * slowest stage)

so `stages` equal batches of b sequences give stages * b tokens per round. That is the best case: vLLM runs up to `stages` batches
at once, but fills the first as far as its budgets allow and does not even them out (vllm-project/vllm#41682, #19873, #50853), so
the true throughput lies between this and one batch at a time.

Layers are dealt out as vLLM does (`get_pp_indices` in vllm/distributed/utils.py): evenly, the rest one each to the last stages but
the very last, which has the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.cost.attention import Rows
from pipeline.cost.model import StepCostModel
from pipeline.cost.shapes import RankShapes, rank_shapes
from schemas.errors import CatalogError
from schemas.hardware import BYTES_PER_WEIGHT, Gpu, KvDtype, Model, WeightDtype


@dataclass(frozen=True)
class Stage:
    """A stage's layers as a model of their own; embeddings with the first stage, LM head with the last."""

    model: Model
    first: bool
    last: bool

    def weight_bytes(self, dtype: WeightDtype, tensor_parallel: int) -> float:
        """Bytes of weights on one rank; embedding and head at bf16. Tied ones are held twice where the ends are apart."""
        model = self.model
        if self.first and self.last:
            return model.weight_bytes(dtype, tensor_parallel)
        body = model.params - model.head_params * (1 if model.tied_embeddings else 2)
        ends = model.head_params * (int(self.first) + int(self.last))
        return (body * BYTES_PER_WEIGHT[dtype] + ends * BYTES_PER_WEIGHT["bf16"]) / tensor_parallel


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: 61 over 4 are 15, 15, 16, 15. Raises CatalogError where there are fewer layers than stages."""
    if stages > layers:
        raise CatalogError(
            f"pipeline_parallel = {stages}, but the model has {layers} layers", mend=f"use at most {layers}"
        )
    each, left = divmod(layers, stages)
    return tuple(each + (stages - 1 - left <= stage < stages - 1) for stage in range(stages))


def stages_of(model: Model, stages: int) -> tuple[Stage, ...]:
    """The stages; windowed layers spread evenly, leading dense layers on the first stages. Raises CatalogError."""
    if stages == 1:
        return (Stage(model, first=True, last=True),)
    cut, done = [], 0
    for count in stage_layers(model.layers, stages):
        windowed = (done + count) * model.window_layers // model.layers - done * model.window_layers // model.layers
        dense = 0 if model.moe is None else min(count, max(0, model.moe.dense_layers - done))
        moe = None if model.moe is None else model.moe.model_copy(update={"dense_layers": dense})
        window = model.window if windowed else None
        part = model.model_copy(update={"layers": count, "moe": moe, "window_layers": windowed, "window": window})
        cut.append(Stage(part, first=done == 0, last=done + count == model.layers))
        done += count
    return tuple(cut)


def stage_shapes(
    model: Model,
    gpu: Gpu,
    *,
    tensor_parallel: int,
    stages: int,
    weight_dtype: WeightDtype,
    kv_dtype: KvDtype,
    expert_parallel: bool,
) -> tuple[RankShapes, ...]:
    """Of each stage, on one rank. The stage before a hop sends; hops leave the node where its GPUs are used up."""
    shapes = []
    per_node = max(1, gpu.max_tensor_parallel // tensor_parallel)
    for place, stage in enumerate(stages_of(model, stages)):
        mine = rank_shapes(stage.model, tensor_parallel, weight_dtype, kv_dtype, expert_parallel=expert_parallel)
        leaves = (place + 1) % per_node == 0
        hops = (0, 0) if stage.last else (int(not leaves), int(leaves))
        shapes.append(replace(mine, head=mine.head if stage.last else None, hops=hops))
    return tuple(shapes)


def round_seconds(model: StepCostModel, stages: tuple[RankShapes, ...], features: Tensor) -> Tensor:
    """[steps] seconds until a sequence of these batches gets its next token, with a batch in flight for every stage."""
    whole: Tensor = model(features).sum(-1)
    if len(stages) == 1:
        return whole
    slowest = torch.stack([stage_seconds(model, stage, features) for stage in stages]).amax(dim=0)
    return torch.maximum(whole, len(stages) * slowest)


def stage_seconds(model: StepCostModel, stage: RankShapes, features: Tensor) -> Tensor:
    """[steps] seconds that one stage is busy with a batch, its send included. All stages' and the overhead are the pass."""
    sampled, *columns, _ = features.unbind(-1)
    rows = Rows(*columns)
    tokens = rows.decode_tokens + rows.prefill_tokens
    prefill, decode = model.attention_seconds(stage, rows)
    seconds = model.body_seconds(stage, tokens) + prefill + decode + model.communication_seconds(stage, tokens)
    return seconds if stage.head is None else seconds + model.sampling_seconds(stage, sampled)
