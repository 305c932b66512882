"""Operator timings on disk, as `preplay calibrate ops FOLDER` reads them: one table per kind of kernel.

Two sources are understood, both described in `benchmarks/measurements/README.md`: NVIDIA AIConfigurator's silicon database
(`GPU_gemm.parquet`, `GPU_attention_prefill.parquet`, `GPU_attention_decode.parquet`, `GPU_moe.parquet`, `GPU_allreduce.parquet`)
and LLMServingSim's per-layer profiles (`llmservingsim_GPU_MODEL_tpN_{dense,attention,per_sequence}.csv`, gzipped or not). Where
several kernels were timed for one shape the fastest stands, as an engine would choose it. Times in microseconds.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from schemas.errors import InputError
from schemas.hardware import Gpu

GEMM_KEYS = ("tokens", "outputs", "inputs")
DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}


def _read(file: Path) -> pl.DataFrame:
    """A Parquet or (gzipped) CSV file. Raises InputError."""
    try:
        return pl.read_parquet(file) if file.suffix == ".parquet" else pl.read_csv(file)
    except (pl.exceptions.PolarsError, OSError) as problem:
        raise InputError(f"can't be read ({str(problem).splitlines()[0]})", file=file) from None


def _found(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


def gemm_timings(folder: Path, gpu: str, dtype: str) -> pl.DataFrame | None:
    """tokens, outputs, inputs, us; large matrices only (a model's are). None where not measured."""
    file = _found(folder, f"{gpu}_gemm.parquet")
    if file is None:
        return None
    named = {kind: name for name, kind in DTYPES.items()}[dtype]
    table = (
        _read(file)
        .filter((pl.col("dtype") == named) & (pl.col("n") >= 1024) & (pl.col("k") >= 1024))
        .filter((pl.col("n") * pl.col("k") >= 2**22) & (pl.col("m") <= 16384))
        .group_by(tokens="m", outputs="n", inputs="k")
        .agg(us=pl.col("latency_ms").min() * 1e3)
        .sort("outputs", "inputs", "tokens")
    )
    return table if table.height else None


def prefill_timings(folder: Path, gpu: str) -> pl.DataFrame | None:
    """batch, q_heads, kv_heads, head_dim, prompt_tokens, us at bf16 KV."""
    file = _found(folder, f"{gpu}_attention_prefill.parquet")
    if file is None:
        return None
    keys = ("batch", "q_heads", "kv_heads", "head_dim", "prompt_tokens")
    return (
        _read(file)
        .filter((pl.col("kv_dtype") == "bfloat16") & (pl.col("prompt_tokens") >= 64))
        .group_by(keys)
        .agg(us=pl.col("latency_ms").min() * 1e3)
        .sort(keys)
    )


def decode_timings(folder: Path, gpu: str) -> pl.DataFrame | None:
    """batch, q_heads, kv_heads, head_dim, context (keys, the new one included), us at bf16 KV."""
    file = _found(folder, f"{gpu}_attention_decode.parquet")
    if file is None:
        return None
    keys = ("batch", "q_heads", "kv_heads", "head_dim", "context")
    return (
        _read(file)
        .filter(pl.col("kv_dtype") == "bfloat16")
        .with_columns(context=pl.col("context_tokens") + 1)
        .group_by(keys)
        .agg(us=pl.col("latency_ms").min() * 1e3)
        .sort(keys)
    )


EXPERT_FORMATS = {"bf16": "bfloat16", "fp8": "fp8_block"}
"""The database's name of the experts' weights. fp8: scales for blocks of 128 x 128, as DeepSeek-V3, Qwen3 and MiniMax-M2
have; the database's other fp8 has one scale per matrix (ModelOpt) and other kernels."""

MODEL_KEYS = ("hidden", "intermediate", "top_k", "experts")


def moe_timings(folder: Path, gpu: str, format: str) -> pl.DataFrame | None:
    """tokens, hidden, intermediate, top_k, experts, tp, ep (up to 8 each), us; visits dealt out evenly. None where not measured.

    `format`: the database's own name of a dtype.
    """
    file = _found(folder, f"{gpu}_moe.parquet")
    if file is None:
        return None
    keys = ("tokens", *MODEL_KEYS, "tp", "ep")
    table = (
        _read(file)
        .filter((pl.col("dtype") == format) & (pl.col("ep") <= 8) & (pl.col("routing") == "balanced"))
        .filter(pl.col("intermediate") // pl.col("tp") >= 128)
        .group_by(keys)
        .agg(us=pl.col("latency_ms").min() * 1e3)
        .sort(keys)
    )
    return table if table.height else None


def too_fast(table: pl.DataFrame, gpu: Gpu, bytes_per_weight: float) -> pl.DataFrame:
    """Models of `moe_timings` that, sliced or expert parallel, seem to read their experts at 95 % of the data sheet's bandwidth or
    more (median up to 256 tokens, where weights are over four times L2): no kernel does, so fewer weights were read than the rows
    say. MODEL_KEYS.
    """
    visited = pl.min_horizontal(pl.col("experts"), pl.col("tokens") * pl.col("top_k")) / pl.col("ep")
    weights = 3.0 * pl.col("hidden") * pl.col("intermediate") / pl.col("tp") * bytes_per_weight * visited
    return (
        table.filter((pl.col("tokens") <= 256) & (weights > 4e6 * gpu.l2_mb))
        .group_by(*MODEL_KEYS, pl.col("ep") > 1)
        .agg(gb_s=(weights / pl.col("us")).median() / 1e3)
        .filter(pl.col("gb_s") > 0.95 * gpu.bandwidth_gb_s)
        .select(MODEL_KEYS)
        .unique()
        .sort(MODEL_KEYS)
    )


def allreduce_timings(folder: Path, gpu: str) -> pl.DataFrame | None:
    """gpus, bytes, us inside CUDA graphs, or eager where that is all there is."""
    file = _found(folder, f"{gpu}_allreduce.parquet")
    if file is None:
        return None
    table = _read(file).with_columns(bytes=pl.col("message_elements") * 2, us=pl.col("latency_ms") * 1e3)
    graphed = table.filter(~pl.col("kernel").str.contains("eager"))
    table = graphed if graphed.height else table
    return table.group_by("gpus", "bytes").agg(pl.col("us").min()).sort("gpus", "bytes")


def layer_profile(folder: Path, gpu: str) -> dict[str, pl.DataFrame] | None:
    """LLMServingSim's profile of one Llama-3.1-8B layer: dense (layer, tokens, us), attention, per_sequence; None without one."""
    parts = {}
    for part in ("dense", "attention", "per_sequence"):
        file = _found(folder, f"llmservingsim_{gpu}_llama-3.1-8b_tp1_{part}.csv*")
        if file is None:
            return None
        parts[part] = _read(file).rename({"time_us": "us"})
    return parts


LLAMA_8B = {"qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096), "down_proj": (4096, 14336)}
"""(outputs, inputs) of a Llama-3.1-8B layer's matrices."""

LLAMA_8B_HEAD = (128256, 4096)


def with_profile(table: pl.DataFrame | None, profile: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """A database's GEMMs with the profile's LM head; the profile's matrices alone where there is no database."""
    gemms = profile_gemms(profile)
    if table is None:
        return gemms
    head = gemms.filter(pl.col("outputs") == LLAMA_8B_HEAD[0])
    return pl.concat([table.cast(gemms.schema), head.cast(gemms.schema)]).sort("outputs", "inputs", "tokens")


def profile_gemms(profile: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """The profile's matrices in the form of `gemm_timings`; the LM head's tokens are its sequences."""
    shapes = pl.DataFrame(
        [{"layer": name, "outputs": out, "inputs": into} for name, (out, into) in LLAMA_8B.items()],
        schema={"layer": pl.String, "outputs": pl.Int64, "inputs": pl.Int64},
    )
    layers = profile["dense"].join(shapes, on="layer").select("tokens", "outputs", "inputs", "us")
    head = (
        profile["per_sequence"]
        .filter(pl.col("layer") == "lm_head")
        .select(
            tokens=pl.col("sequences"),
            outputs=pl.lit(LLAMA_8B_HEAD[0], pl.Int64),
            inputs=pl.lit(LLAMA_8B_HEAD[1], pl.Int64),
            us=pl.col("us"),
        )
    )
    return pl.concat([layers, head]).sort("outputs", "inputs", "tokens")
