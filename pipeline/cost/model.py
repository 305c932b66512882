"""The torch module: a batch of steps in, seconds by component out.

Every kernel costs the larger of its arithmetic and its memory traffic (roofline: Williams et al., CACM 2009), each at the
share of its peak that the parameters say, plus a launch gap. Worked number: one decode step of Llama-3.1-70B on 4 H100
reads 35 GB of weights per rank; 35e9 / (0.8 * 3.35e12) = 13.1 ms, whatever the batch, until the batch's arithmetic
(2 * 17.6e9 FLOP per token and rank at 0.75 * 989e12) exceeds it at about 276 tokens.

Shapes: `forward` maps `[steps, len(FEATURES)]` float64 to `[steps, len(COMPONENTS)]` float64 seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.cost.drafter import Drafter
from pipeline.cost.efficiency import DEFAULT, Efficiency
from pipeline.cost.shapes import ACTIVATION_BYTES, Experts, Matrix, RankShapes
from schemas.errors import CatalogError
from schemas.hardware import Gpu, WeightDtype
from schemas.outcome import COMPONENTS

FEATURES = (
    "tokens",
    "rows",
    "sampled",
    "prefill_pairs",
    "prefill_context",
    "decode_pairs",
    "decode_context",
    "draft_passes",
)
"""What describes a step; defined in docs/replay.md."""

SAMPLING_PASSES = 4
"""Sweeps over float32 logits by softmax, top-p and the draw; the logits themselves are the LM head's output."""


class StepCostModel(nn.Module):
    """Seconds of one engine step on one GPU (all ranks of a tensor-parallel group work alike)."""

    def __init__(
        self,
        gpu: Gpu,
        shapes: RankShapes,
        weight_dtype: WeightDtype = "bf16",
        drafter: Drafter | None = None,
        efficiency: Efficiency = DEFAULT,
        graph_sizes: tuple[int, ...] = (),
    ) -> None:
        """`graph_sizes`: token counts, ascending, for which CUDA graphs were captured; () = no padding.

        Raises CatalogError for fp8 weights on a GPU without fp8.
        """
        super().__init__()
        self.gpu = gpu
        self.shapes = shapes
        self.drafter = drafter
        self.graph_sizes = torch.tensor(graph_sizes, dtype=torch.float64)
        self.peak_flops = _peak_flops(gpu, weight_dtype)
        self.log_parameters = nn.ParameterDict(
            {
                name: nn.Parameter(torch.tensor(value, dtype=torch.float64).log())
                for name, value in efficiency._asdict().items()
            }
        )

    def parameter(self, name: str) -> Tensor:
        """One efficiency, positive because its logarithm is what is stored."""
        value: Tensor = self.log_parameters[name].exp()
        return value

    def forward(self, features: Tensor) -> Tensor:
        """Seconds of each step by component; see the module's docstring for the shapes."""
        tokens, rows, sampled, prefill_pairs, prefill_context, decode_pairs, decode_context, passes = features.unbind(
            -1
        )
        pairs, context = prefill_pairs + decode_pairs, prefill_context + decode_context
        parts = {
            "gemm": self.body_seconds(self.shapes, tokens),
            "attention_prefill": self.attention_seconds(self.shapes, prefill_pairs, prefill_context),
            "attention_decode": self.attention_seconds(self.shapes, decode_pairs, decode_context),
            "communication": self.allreduce_seconds(self.shapes, tokens),
            "sampling": self.head_seconds(self.shapes, sampled) + self.sampler_seconds(self.shapes, sampled),
            "draft": self.draft_seconds(tokens, rows, pairs, context, passes),
            "overhead": (self.parameter("step_us") + self.parameter("sequence_us") * rows) * 1e-6,
        }
        return torch.stack([parts[name] for name in COMPONENTS], dim=-1)

    def body_seconds(self, shapes: RankShapes, tokens: Tensor) -> Tensor:
        """All linear layers of one pass over `tokens`, experts included, and the pointwise kernels between them."""
        tokens = self.padded(tokens)
        seconds = torch.zeros_like(tokens)
        for matrix in shapes.matrices:
            seconds = seconds + matrix.count * self.matrix_seconds(matrix, tokens)
        if shapes.experts is not None:
            seconds = seconds + self.experts_seconds(shapes.experts, tokens)
        seconds = seconds + shapes.pointwise_bytes_per_token * tokens / self._memory()
        return seconds + shapes.kernels * self.parameter("kernel_us") * 1e-6

    def padded(self, tokens: Tensor) -> Tensor:
        """What a pass over `tokens` computes: as many as the next larger captured CUDA graph, where there is one.

        Attention and the LM head work on the real ones only (vLLM pads the rest of the pass).
        """
        if self.graph_sizes.numel() == 0:
            return tokens
        place = torch.searchsorted(self.graph_sizes, tokens.contiguous())
        captured = self.graph_sizes[place.clamp(max=self.graph_sizes.numel() - 1)]
        return torch.where((tokens > 0) & (place < self.graph_sizes.numel()), captured, tokens)

    def matrix_seconds(self, matrix: Matrix, tokens: Tensor) -> Tensor:
        """`tokens x inputs` times `inputs x outputs`: 2 FLOPs per weight and token against weights and activations."""
        weights = matrix.inputs * matrix.outputs
        flops = 2.0 * weights * tokens
        moved = weights * matrix.bytes_per_weight + (matrix.inputs + matrix.outputs) * ACTIVATION_BYTES * tokens
        return torch.maximum(flops / self._flops(), moved / self._memory())

    def experts_seconds(self, experts: Experts, tokens: Tensor) -> Tensor:
        """Routed experts: `tokens` visit `E (1 - (1 - k/E)^tokens)` distinct ones (uniform routing), each read once."""
        distinct = experts.experts * (1.0 - (1.0 - experts.per_token / experts.experts) ** tokens)
        visits = tokens * experts.per_token
        flops = 2.0 * experts.params * visits
        moved = experts.params * experts.bytes_per_weight * distinct + 2 * experts.hidden * ACTIVATION_BYTES * visits
        return experts.layers * torch.maximum(flops / self._flops(), moved / self._memory())

    def attention_seconds(self, shapes: RankShapes, pairs: Tensor, context: Tensor) -> Tensor:
        """Query-key pairs against KV bytes, read once per row however many queries it has (verification shares them)."""
        flops = shapes.attention_flops_per_pair * pairs
        peak = self.parameter("attention_flops") * self.gpu.bf16_tflops * 1e12
        return torch.maximum(flops / peak, shapes.kv_bytes_per_token * context / self._memory())

    def allreduce_seconds(self, shapes: RankShapes, tokens: Tensor) -> Tensor:
        """Ring all-reduce: `2 (n - 1) / n` times the message over one rank's link, plus a latency, per all-reduce."""
        if shapes.allreduces == 0:
            return torch.zeros_like(tokens)
        ranks = shapes.tensor_parallel
        tokens = self.padded(tokens)
        moved = 2.0 * (ranks - 1) / ranks * shapes.message_bytes_per_token * tokens
        link = self.parameter("link") * self.gpu.link_gb_s * 1e9
        return shapes.allreduces * (self.parameter("link_latency_us") * 1e-6 + moved / link)

    def head_seconds(self, shapes: RankShapes, positions: Tensor) -> Tensor:
        """LM head over the positions that need logits."""
        if shapes.head is None:
            return torch.zeros_like(positions)
        return self.matrix_seconds(shapes.head, positions)

    def sampler_seconds(self, shapes: RankShapes, positions: Tensor) -> Tensor:
        """Sweeps over the logits (float32) of every position, on the whole vocabulary (logits are gathered)."""
        logits = shapes.vocab * shapes.tensor_parallel * 4.0
        return SAMPLING_PASSES * logits * positions / self._memory() + 4 * self.parameter("kernel_us") * 1e-6

    def draft_seconds(self, tokens: Tensor, rows: Tensor, pairs: Tensor, context: Tensor, passes: Tensor) -> Tensor:
        """The drafter at the step's end: its first pass over all the step's tokens (it needs their KV too), then
        `passes - 1` over one token per row. Greedy drafting: LM head, no sampler.
        """
        if self.drafter is None:
            return torch.zeros_like(tokens)
        shapes = self.drafter.shapes
        launch = self.parameter("draft_pass_us") * 1e-6
        first = (
            self.body_seconds(shapes, tokens)
            + self.attention_seconds(shapes, pairs, context)
            + self.allreduce_seconds(shapes, tokens)
            + self.head_seconds(shapes, rows)
            + launch
        )
        later = (
            self.body_seconds(shapes, rows)
            + self.attention_seconds(shapes, context, context)
            + self.allreduce_seconds(shapes, rows)
            + self.head_seconds(shapes, rows)
            + launch
        )
        return torch.where(passes > 0, first + (passes - 1).clamp(min=0) * later, torch.zeros_like(first))

    def _flops(self) -> Tensor:
        return self.parameter("gemm_flops") * self.peak_flops

    def _memory(self) -> Tensor:
        return self.parameter("memory") * self.gpu.bandwidth_gb_s * 1e9


def _peak_flops(gpu: Gpu, weight_dtype: WeightDtype) -> float:
    if weight_dtype == "fp8":
        if gpu.fp8_tflops is None:
            raise CatalogError(f"{gpu.name} has no fp8 arithmetic", mend="use weight_dtype = 'bf16' or 'int4'")
        return gpu.fp8_tflops * 1e12
    return gpu.bf16_tflops * 1e12  # int4 weights are widened to bf16 before the multiplication
