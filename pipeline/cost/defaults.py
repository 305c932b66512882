"""Constants for a GPU that nobody calibrated: its data sheet, times what the calibrated ones reach of theirs.

Shares of peaks are rounded medians over the shipped calibrations (`schemas/catalog/calibrations/`); launch times are theirs,
too. Where a calibration lacks a part (another dtype, no decode measurements), that part alone comes from here, and is named.
"""

from __future__ import annotations

from schemas.calibration import (
    AllReduceTerm,
    AttentionTerm,
    Calibration,
    DecodeTerm,
    ExpertsTerm,
    GemmTerm,
    HostTerm,
    TrafficTerm,
)
from schemas.hardware import Gpu

MEMORY_SHARE = 0.88
"""Of the data sheet's bandwidth, by kernels that stream more than the cache holds."""

GEMM_SHARE = 0.85
ATTENTION_SHARE = 0.57
LINK_SHARE = 0.70

UNPACKED = frozenset({"a100-80g", "l40s", "rtx-4090", "rtx-pro-6000"})
"""GPUs on which vLLM runs FlashAttention 2, whose calls with several queries tile every query head alone."""


def gemm(gpu: Gpu, dtype: str) -> GemmTerm:
    """bf16, fp8, or int4 (widened to bf16 before the multiplication)."""
    peak = gpu.fp8_tflops if dtype == "fp8" and gpu.fp8_tflops is not None else gpu.bf16_tflops
    return GemmTerm(
        launch_us=3.0,
        bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s,
        tflops=GEMM_SHARE * peak,
        half_tile=0.75,
        quarter_tile=0.75,
        sharpness=4.0,
        extra_inputs=150.0,
        quantised=0.5,
    )


def attention(gpu: Gpu) -> AttentionTerm:
    """A unit is 4.19 MFLOP; an SM does them at its share of the peak."""
    unit_flops = 4.0 * 64 * 128 * 128
    return AttentionTerm(
        launch_us=5.0,
        block_us=1.3,
        unit_us=unit_flops / (ATTENTION_SHARE * gpu.bf16_tflops * 1e6 / gpu.sms),
        query_us=0.5,
        empty_us=0.3,
        bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s,
        offset_us=1.0,
        spill_low=0.5,
        spill_high=1.0,
        stall=0.1,
        sharpness=6.0,
        packs_groups=gpu.name not in UNPACKED,
    )


def decode(gpu: Gpu) -> DecodeTerm:
    """KV streamed at the memory's share."""
    return DecodeTerm(launch_us=8.0, bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s, wave_us=3.0, sharpness=2.0)


def pointwise(gpu: Gpu) -> TrafficTerm:
    """Norms, rotary, activation."""
    return TrafficTerm(
        launch_us=2.0,
        bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s,
        cached_gb_s=1.6 * gpu.bandwidth_gb_s,
    )


def sampler(gpu: Gpu) -> TrafficTerm:
    """Softmax, top-p and the draw over float32 logits."""
    return TrafficTerm(
        launch_us=25.0,
        bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s,
        cached_gb_s=2.0 * gpu.bandwidth_gb_s,
        row_us=0.1,
    )


def experts(gpu: Gpu, dtype: str) -> ExpertsTerm:
    """A fused mixture-of-experts kernel."""
    peak = gpu.fp8_tflops if dtype == "fp8" and gpu.fp8_tflops is not None else gpu.bf16_tflops
    return ExpertsTerm(
        launch_us=20.0,
        bandwidth_gb_s=MEMORY_SHARE * gpu.bandwidth_gb_s,
        tflops=0.6 * peak,
        tile_rows=16.0,
        token_us=0.04,
        sharpness=2.0,
    )


def allreduce(gpu: Gpu) -> AllReduceTerm:
    """One link generation's latency, its share of the bandwidth."""
    return AllReduceTerm(latency_us=18.0 if gpu.link == "pcie" else 5.0, link_gb_s=LINK_SHARE * gpu.link_gb_s)


HOST = HostTerm(
    step_us=0.0,
    sequence_us=0.0,
    draft_pass_us=200.0,
    basis="step and sequence: hidden behind the GPU by asynchronous scheduling (vLLM's default since 0.19), as in the two real "
    "runs of docs/validation.md; draft pass: vllm-project/vllm#20780, an EAGLE draft pass on Llama-3.1-8B takes 0.74 ms, of which "
    "LM head and layer explain 0.55",
)


def completed(calibration: Calibration | None, gpu: Gpu, dtype: str) -> tuple[Calibration, tuple[str, ...]]:
    """A calibration with every part that a model at `dtype` needs, and the names of those that came from here."""
    base = calibration or Calibration(name="none", gpu=gpu.name, engine="none", sources=())
    missing = []
    changes: dict[str, object] = {}
    for name, make in (("attention", attention), ("decode", decode), ("pointwise", pointwise), ("sampler", sampler)):
        if getattr(base, name) is None:
            missing.append(name)
            changes[name] = make(gpu)
    gemms, moes = dict(base.gemm), dict(base.experts)
    for kind in dict.fromkeys((dtype, "bf16")):
        if kind not in gemms:
            missing.append(f"gemm {kind}")
            gemms[kind] = gemm(gpu, kind)
            if kind == "int4" and "bf16" in base.gemm:  # the same kernels after the weights were widened
                gemms[kind] = base.gemm["bf16"].model_copy(update={"residual": None})
        if kind not in moes:
            missing.append(f"experts {kind}")
            moes[kind] = experts(gpu, kind)
            if kind == "int4" and "bf16" in base.experts:
                moes[kind] = base.experts["bf16"]
    if not base.allreduce:
        missing.append("allreduce")
    changes |= {"gemm": gemms, "experts": moes, "host": base.host or HOST}
    return base.model_copy(update=changes), tuple(missing)
