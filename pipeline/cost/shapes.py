"""What one rank computes for one model: its matrices, its attention, its messages. Pure arithmetic, no time.

Tensor parallelism follows Megatron-LM (arXiv 1909.08053): attention by heads, MLP by columns then rows, so one layer has two
all-reduces of `tokens x hidden`; the LM head by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.hardware import BYTES_PER_KV, BYTES_PER_WEIGHT, KvDtype, Model, WeightDtype

ACTIVATION_BYTES = 2.0
"""bf16 activations, whatever the weights."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer of one rank: `inputs x outputs` weights, `count` of them per pass."""

    inputs: float
    outputs: float
    count: int
    bytes_per_weight: float


@dataclass(frozen=True)
class Experts:
    """The routed experts of one rank: each expert's share of weights on it, and how tokens choose."""

    experts: int  # of the layer, on all ranks together
    per_token: int
    ranks: int  # that the experts are divided over, whole; 1 = every rank has a slice of each
    params: float  # weights of one expert on this rank
    hidden: int
    width: float  # of one expert's MLP on this rank
    layers: int
    bytes_per_weight: float


@dataclass(frozen=True)
class Attention:
    """One layer's attention on one rank."""

    layers: int
    q_heads: float
    kv_heads: float  # heads whose KV is kept; 1 for a latent (MLA)
    reads: float  # query heads that read the same KV each for itself: the group in GQA, 1 where they share a read (MLA)
    kv_bytes: float  # per token
    flops_per_pair: float  # per query head and query-key pair: scores, then values


@dataclass(frozen=True)
class Pointwise:
    """The kernels between one layer's matrices, on one rank: bytes per token that each moves."""

    layers: int
    norms: tuple[float, ...]
    rotary: float
    activation: float


@dataclass(frozen=True)
class RankShapes:
    """One pass of a model on one rank of a tensor-parallel group."""

    matrices: tuple[Matrix, ...]
    experts: Experts | None
    head: Matrix | None
    attention: Attention  # layers that see everything
    window_attention: Attention | None  # layers that see the last `window` tokens
    window: int  # 0 = no such layers
    pointwise: Pointwise
    allreduces: int
    message_bytes_per_token: float
    vocab: float
    tensor_parallel: int
    hops: tuple[int, int] = (0, 0)  # sends to the next pipeline stage: (within the node, over the network)


def rank_shapes(
    model: Model,
    tensor_parallel: int,
    weight_dtype: WeightDtype,
    kv_dtype: KvDtype,
    *,
    layers: int | None = None,
    expert_parallel: bool = False,
) -> RankShapes:
    """The shapes of `model` on one rank. `layers` overrides the model's own number (an EAGLE head has its target's widths).
    `expert_parallel`: routed experts whole on one rank each, instead of a slice of each on every rank.

    Raises CatalogError where heads or experts can't be divided among the ranks.
    """
    model.check_tensor_parallel(tensor_parallel, expert_parallel=expert_parallel)
    depth = model.layers if layers is None else layers
    tp = tensor_parallel
    weight = BYTES_PER_WEIGHT[weight_dtype]
    moe_layers = 0 if model.moe is None else max(0, depth - model.moe.dense_layers)
    matrices = [*_attention_matrices(model, tp, depth, weight)]
    if depth > moe_layers:
        matrices += _mlp_matrices(model, model.intermediate, tp, depth - moe_layers, weight)
    windowed = model.window_layers if layers is None else 0  # an EAGLE head sees everything
    experts = None
    if model.moe is not None and moe_layers:
        matrices.append(Matrix(model.hidden, model.moe.experts, moe_layers, BYTES_PER_WEIGHT["bf16"]))
        if model.moe.shared_experts:
            shared = model.moe.expert_intermediate * model.moe.shared_experts
            matrices += _mlp_matrices(model, shared, tp, moe_layers, weight)
        slices = 1 if expert_parallel else tp
        experts = Experts(
            experts=model.moe.experts,
            per_token=model.moe.experts_per_token,
            ranks=tp if expert_parallel else 1,
            params=model.expert_params / slices,
            hidden=model.hidden,
            width=model.moe.expert_intermediate / slices,
            layers=moe_layers,
            bytes_per_weight=weight,
        )
    return RankShapes(
        matrices=tuple(matrices),
        experts=experts,
        head=Matrix(model.hidden, model.vocab / tp, 1, BYTES_PER_WEIGHT["bf16"]),
        attention=_attention(model, tp, depth - windowed, kv_dtype),
        window_attention=_attention(model, tp, windowed, kv_dtype) if windowed else None,
        window=model.window or 0 if windowed else 0,
        pointwise=_pointwise(model, tp, depth),
        allreduces=0 if tp == 1 else 2 * depth,
        message_bytes_per_token=model.hidden * ACTIVATION_BYTES,
        vocab=model.vocab / tp,
        tensor_parallel=tp,
    )


def _attention_matrices(model: Model, tp: int, layers: int, weight: float) -> list[Matrix]:
    if model.mla is not None:
        mla = model.mla
        heads = model.q_heads / tp
        qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        return [  # the two down-projections are repeated on every rank
            Matrix(model.hidden, mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim, layers, weight),
            Matrix(mla.q_lora_rank or model.hidden, heads * qk_dim, layers, weight),
            Matrix(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), layers, weight),
            Matrix(heads * mla.v_head_dim, model.hidden, layers, weight),
        ]
    kv_heads = max(1.0, model.kv_heads / tp)
    return [
        Matrix(model.hidden, (model.q_heads / tp + 2 * kv_heads) * model.head_dim, layers, weight),
        Matrix(model.q_heads / tp * model.head_dim, model.hidden, layers, weight),
    ]


def _mlp_matrices(model: Model, intermediate: int, tp: int, layers: int, weight: float) -> list[Matrix]:
    """Gate and up as one matrix (up alone where there is no gate), and down."""
    return [
        Matrix(model.hidden, (model.mlp_matrices - 1) * intermediate / tp, layers, weight),
        Matrix(intermediate / tp, model.hidden, layers, weight),
    ]


def _attention(model: Model, tp: int, layers: int, kv_dtype: KvDtype) -> Attention:
    """GQA by heads. MLA attends in the latent space (absorbed form): every head reads the one latent."""
    kv_bytes = model.kv_elements_per_token(tp) / model.layers * BYTES_PER_KV[kv_dtype]
    if model.mla is not None:
        mla = model.mla
        flops = 2.0 * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
        return Attention(layers, model.q_heads / tp, 1.0, 1.0, kv_bytes, flops)
    q_heads, kv_heads = model.q_heads / tp, max(1.0, model.kv_heads / tp)
    return Attention(layers, q_heads, kv_heads, q_heads / kv_heads, kv_bytes, 4.0 * model.head_dim)


def _pointwise(model: Model, tp: int, layers: int) -> Pointwise:
    """Two norms that add the residual (two reads, two writes of `hidden`), rotary (queries and keys read and written), gated
    activation (two reads, one write of the MLP's width; top-k widths in a mixture of experts; one read without a gate).
    """
    width = model.intermediate if model.moe is None else model.moe.expert_intermediate * model.moe.experts_per_token
    norm = 4.0 * model.hidden * ACTIVATION_BYTES
    rotated = 2.0 * (model.q_heads + model.kv_heads) * model.head_dim / tp * ACTIVATION_BYTES
    return Pointwise(layers, (norm, norm), rotated, model.mlp_matrices * width / tp * ACTIVATION_BYTES)
