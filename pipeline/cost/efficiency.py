"""The numbers that the physics can't give: how much of each peak a real engine reaches, and what the host adds.

These are the parameters of the torch module, positive by construction. The defaults are not a calibration of anything in
particular: they are rounded medians of public single-kernel measurements, and every report made with them says so.

| parameter | default | what it rests on |
| --- | --- | --- |
| gemm_flops | 0.75 | large bf16 GEMMs (m >= 2048; n, k >= 4096) of NVIDIA AIConfigurator's database (ai-dynamo/aiconfigurator, commit 095f58a5): median 0.81 on H100, 0.79 H200, 0.70 B200, 0.64 L40S |
| memory | 0.80 | the same source: weight-bound GEMMs (m <= 8, over 200 MB) 0.88 on H100, 0.83 H200, 0.79 B200, 0.83 L40S; decode attention over 500 MB of KV 0.87, 0.82, 0.80, 0.81 |
| attention_flops | 0.52 | the same source: causal prefill of 4,096 tokens and more: 0.57 on H100, 0.56 H200, 0.51 B200, 0.45 L40S |
| link | 0.68 | the same source: all-reduce of 67 MB over 4 H100: 1.5 * 67 MB / 0.33 ms = 305 GB/s of 450 |
| link_latency_us | 5 | the same source: all-reduce of under 20 kB over 4 H100: 4.6 to 4.8 us |
| kernel_us | 1 | gap and ramp of one kernel inside a CUDA graph; order of magnitude, not measured here |
| step_us | 500 | host time per step that the GPU waits for; order of magnitude, not measured here |
| sequence_us | 15 | host time per scheduled sequence and step: 15 to 25 us explain real vLLM 0.19 runs (casys-kaist/LLMServingSim, bench/examples) |
| draft_pass_us | 200 | vllm-project/vllm#20780: an EAGLE draft pass on Llama-3.1-8B takes 0.74 ms, of which LM head and layer explain 0.55 |
"""

from __future__ import annotations

from typing import NamedTuple


class Efficiency(NamedTuple):
    """Shares of a peak are dimensionless in (0, 1]; the rest are microseconds."""

    gemm_flops: float = 0.75
    memory: float = 0.80
    attention_flops: float = 0.52
    link: float = 0.68
    link_latency_us: float = 5.0
    kernel_us: float = 1.0
    step_us: float = 500.0
    sequence_us: float = 15.0
    draft_pass_us: float = 200.0


DEFAULT = Efficiency()
PROVENANCE = "not calibrated: default efficiencies (rounded medians of public kernel measurements)"
"""What the report's badge says as long as nothing else was fitted."""
