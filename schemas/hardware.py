"""GPUs and models: the numbers of data sheets and of `config.json` files, with what follows from them by arithmetic.

FLOPs, bytes and parameter counts live here, on the thing they describe, so that the cost model, the capacity of the KV
pool and the report can't disagree. The catalogue itself is data: `catalog/gpus.toml` and `catalog/models.toml`, each
entry with its source. Models that it lacks are read from their `config.json` (`schemas/hf_config.py`, docs/models.md).
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from schemas.errors import CatalogError
from schemas.validation import validated

GIB = 1024**3

WeightDtype = Literal["bf16", "fp8", "int4"]
KvDtype = Literal["bf16", "fp8"]

BYTES_PER_WEIGHT: dict[str, float] = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2.0 / 128}
"""int4: half a byte plus one 16-bit scale per group of 128 (AWQ and GPTQ's usual group)."""

BYTES_PER_KV: dict[str, int] = {"bf16": 2, "fp8": 1}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    source: str = Field(min_length=1, description="where the numbers come from")


class Gpu(_Entry):
    """One GPU: data-sheet peaks, dense (no structured sparsity), one direction for links."""

    memory_gib: PositiveFloat = Field(description="device memory as the driver reports it, GiB")
    bandwidth_gb_s: PositiveFloat = Field(description="device memory bandwidth, 1e9 bytes/s")
    bf16_tflops: PositiveFloat = Field(description="dense tensor-core peak at bf16, 1e12 FLOP/s")
    fp8_tflops: PositiveFloat | None = Field(default=None, description="the same at fp8; null = the chip has none")
    link: Literal["nvlink", "xgmi", "pcie"]
    link_gb_s: PositiveFloat = Field(description="GPU-to-GPU bandwidth per GPU, one direction, 1e9 bytes/s")
    host_gb_s: PositiveFloat = Field(description="bandwidth to the host's memory, one direction, 1e9 bytes/s")
    sms: PositiveInt = Field(description="streaming multiprocessors (compute units)")
    l2_mb: PositiveFloat = Field(description="last-level cache, 1e6 bytes")
    max_tensor_parallel: PositiveInt = Field(default=8, description="GPUs in one link domain")


class Moe(BaseModel):
    """Mixture of experts: which layers have it, how wide, how many experts a token visits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: PositiveInt
    experts_per_token: PositiveInt
    expert_intermediate: PositiveInt
    shared_experts: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0, description="leading layers with an ordinary MLP instead")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than experts {self.experts}")
        return self


class Mla(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed KV vector per token and layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    q_lora_rank: int = Field(default=0, ge=0, description="0 = queries are projected from the hidden state directly")
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class Model(_Entry):
    """One decoder-only transformer, as its `config.json` describes it."""

    layers: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt = Field(description="width of the (dense) MLP")
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt
    max_context: PositiveInt = Field(description="longest sequence, prompt and output, tokens")
    tied_embeddings: bool = False
    gated_mlp: bool = Field(default=True, description="MLPs have a gate beside up and down: three matrices, else two")
    window: PositiveInt | None = Field(default=None, description="sliding window, tokens; null = every layer sees all")
    window_layers: int = Field(default=0, ge=0, description="layers whose attention sees only the window")
    moe: Moe | None = None
    mla: Mla | None = None
    published_params: PositiveFloat | None = Field(
        default=None, description="total parameters as its publisher states them, 1e9; checked against the shapes"
    )
    notes: tuple[str, ...] = Field(
        default=(), exclude=True, description="what was assumed or left out when a config.json was read; for the report"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(f"dense_layers {self.moe.dense_layers} is more than layers {self.layers}")
        if self.window_layers > self.layers:
            raise ValueError(f"window_layers {self.window_layers} is more than layers {self.layers}")
        if (self.window is None) != (self.window_layers == 0):
            raise ValueError(f"window {self.window} and window_layers {self.window_layers} go together")
        return self

    @property
    def full_attention_layers(self) -> int:
        """Layers whose attention sees the whole context."""
        return self.layers - self.window_layers

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return 0 if self.moe is None else self.layers - self.moe.dense_layers

    @property
    def attention_params_per_layer(self) -> int:
        """Weights of one layer's attention projections (norms and biases, under 0.1 %, left out)."""
        if self.mla is not None:
            mla = self.mla
            qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            return (
                self.hidden * mla.q_lora_rank
                + (mla.q_lora_rank or self.hidden) * self.q_heads * qk_dim
                + self.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
                + mla.kv_lora_rank * self.q_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
                + self.q_heads * mla.v_head_dim * self.hidden
            )
        return self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP or expert: gate, up and down, or up and down alone."""
        return 3 if self.gated_mlp else 2

    @property
    def mlp_params_per_layer(self) -> int:
        """Weights of one dense MLP."""
        return self.mlp_matrices * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """Weights of one expert. Raises nothing; 0 for a dense model."""
        return 0 if self.moe is None else self.mlp_matrices * self.hidden * self.moe.expert_intermediate

    @property
    def head_params(self) -> int:
        """Weights of the LM head (or of the embedding, which has the same shape)."""
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        """All parameters, embeddings and every expert included."""
        per_layer = self.layers * self.attention_params_per_layer
        dense = (self.layers - self.moe_layers) * self.mlp_params_per_layer
        experts = 0
        if self.moe is not None:
            experts = self.moe_layers * (
                (self.moe.experts + self.moe.shared_experts) * self.expert_params + self.hidden * self.moe.experts
            )
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return per_layer + dense + experts + embeddings

    def kv_elements_per_token(self, tensor_parallel: int = 1) -> int:
        """KV elements of one token, all layers, on one rank.

        GQA: heads are divided among ranks and repeated when there are more ranks than KV heads. MLA: the latent is
        repeated on every rank (as in vLLM's tensor parallelism).

        Layers with a sliding window count in full: an upper bound. vLLM's hybrid KV cache manager keeps about `window`
        tokens per request in them, so a request longer than the window really takes less.
        """
        if self.mla is not None:
            return self.layers * (self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
        return self.layers * 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: KvDtype = "bf16", tensor_parallel: int = 1) -> int:
        """Bytes of KV cache that one token takes on one rank."""
        return self.kv_elements_per_token(tensor_parallel) * BYTES_PER_KV[kv_dtype]

    def weight_bytes(self, dtype: WeightDtype = "bf16", tensor_parallel: int = 1) -> float:
        """Bytes of weights on one rank. Embedding and LM head stay at bf16 whatever the quantisation."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        body = self.params - embeddings
        return (body * BYTES_PER_WEIGHT[dtype] + embeddings * BYTES_PER_WEIGHT["bf16"]) / tensor_parallel

    def check_tensor_parallel(self, tensor_parallel: int, *, expert_parallel: bool = False) -> None:
        """Raises CatalogError where the heads, or under expert parallelism the experts, can't be divided among so many ranks."""
        if expert_parallel and (self.moe is None or self.moe.experts % tensor_parallel):
            count = 0 if self.moe is None else self.moe.experts
            raise CatalogError(
                f"{self.name} has {count} experts: they can't be divided among tensor_parallel = {tensor_parallel}",
                mend="set expert_parallel = false" if self.moe is None else "choose a divisor of the experts",
            )
        heads_divide = self.q_heads % tensor_parallel == 0
        kv_divide = self.kv_heads % tensor_parallel == 0 or tensor_parallel % self.kv_heads == 0
        if not heads_divide or not (kv_divide or self.mla is not None):
            raise CatalogError(
                f"{self.name} has {self.q_heads} query and {self.kv_heads} KV heads: "
                f"they can't be divided among tensor_parallel = {tensor_parallel}",
                mend="choose a divisor of the query heads",
            )


Entry = TypeVar("Entry", bound=_Entry)


@cache
def gpus() -> dict[str, Gpu]:
    """The catalogue of GPUs, by name."""
    return _catalog("gpus.toml", Gpu)


@cache
def models() -> dict[str, Model]:
    """The catalogue of models, by name."""
    return _catalog("models.toml", Model)


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises CatalogError with the known names."""
    return _named("GPU", name, gpus())


def model(name: str, base: Path | None = None) -> Model:
    """The model of that name in the catalogue, or the one that a `config.json` at that path describes.

    A name that ends in ".json", holds a path separator or is an existing folder is a path, relative to `base` (the study
    file's folder; None = the current directory). A name of the catalogue is never a path. Files are read once per process.

    Raises CatalogError with the known names, or for a file that Preplay can't represent.
    """
    path = Path(name) if base is None else base / name
    looks_like_a_path = name.endswith(".json") or "/" in name or os.sep in name
    if name and name not in models() and (looks_like_a_path or os.path.isdir(path)):  # noqa: PTH112, never raises
        return _model_at(path)
    return _named("model", name, models(), "or the path of a config.json, such as './my-model/config.json'")


def _model_at(path: Path) -> Model:
    from schemas.hf_config import model_from_config  # it needs Model from here

    key = path.absolute()
    if key not in _models_read:
        _models_read[key] = model_from_config(path)
    return _models_read[key]


_models_read: dict[Path, Model] = {}


def _named(kind: str, name: str, known: dict[str, Entry], otherwise: str = "") -> Entry:
    try:
        return known[name]
    except KeyError:
        mend = ", ".join(sorted(known))
        mend = f"known: {mend}; {otherwise}" if otherwise else f"known: {mend}"
        raise CatalogError(f"unknown {kind} '{name}'", mend=mend) from None


def _catalog(file: str, entry: type[Any]) -> dict[str, Any]:
    text = resources.files("schemas").joinpath("catalog", file).read_text(encoding="utf-8")
    return {
        name: validated(entry, {"name": name, **data}, error=CatalogError, file=f"schemas/catalog/{file}", place=name)
        for name, data in tomllib.loads(text).items()
    }
