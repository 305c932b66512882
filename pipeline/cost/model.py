"""The torch module: a batch of steps in, seconds by component out.

One module per kind of kernel (`gemm`, `attention`, `experts`, `traffic`), each with its formula, units and source; here they are
put together to a step. Constants come from a calibration (`schemas/calibration.py`), parts that it lacks from the data sheet
(`defaults`).

Shapes: `forward` maps `[steps, len(FEATURES)]` float64 to `[steps, len(COMPONENTS)]` float64 seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.cost import defaults, transfer
from pipeline.cost.attention import DecodeAttention, PrefillAttention, Rows, within_window
from pipeline.cost.drafter import Drafter
from pipeline.cost.experts import MixtureOfExperts
from pipeline.cost.gemm import Gemm
from pipeline.cost.shapes import Attention, RankShapes
from pipeline.cost.terms import Positive
from pipeline.cost.traffic import Traffic
from schemas.calibration import Calibration
from schemas.errors import CatalogError
from schemas.hardware import Gpu, WeightDtype
from schemas.outcome import COMPONENTS

FEATURES = ("sampled", *Rows._fields, "draft_passes")
"""What describes a step; defined in docs/replay.md."""


class StepCostModel(nn.Module):
    """Seconds of one engine step on one GPU (all ranks of a tensor-parallel group work alike)."""

    def __init__(
        self,
        gpu: Gpu,
        shapes: RankShapes,
        weight_dtype: WeightDtype = "bf16",
        drafter: Drafter | None = None,
        calibration: Calibration | None = None,
        graph_sizes: tuple[int, ...] = (),
    ) -> None:
        """`graph_sizes`: token counts, ascending, for which CUDA graphs were captured; () = no padding.

        Raises CatalogError for fp8 weights on a GPU without fp8.
        """
        super().__init__()
        if weight_dtype == "fp8" and gpu.fp8_tflops is None:
            raise CatalogError(f"{gpu.name} has no fp8 arithmetic", mend="use weight_dtype = 'bf16' or 'int4'")
        self.gpu, self.shapes, self.drafter, self.weight_dtype = gpu, shapes, drafter, weight_dtype
        self.calibration, self.missing = defaults.completed(calibration, gpu, weight_dtype)
        full = self.calibration
        assert full.attention and full.decode and full.pointwise and full.sampler and full.host
        self.body_gemm = Gemm(full.gemm[weight_dtype], gpu.sms)
        self.bf16_gemm = self.body_gemm if weight_dtype == "bf16" else Gemm(full.gemm["bf16"], gpu.sms)
        self.prefill_attention = PrefillAttention(full.attention, gpu.sms, gpu.l2_mb)
        self.decode_attention = DecodeAttention(full.decode, gpu.sms)
        self.pointwise = Traffic(full.pointwise, gpu.l2_mb)
        self.sampler = Traffic(full.sampler, gpu.l2_mb)
        self.experts = MixtureOfExperts(full.experts[weight_dtype])
        link = full.allreduce.get(shapes.tensor_parallel) or defaults.allreduce(gpu)
        self.allreduce = Positive(link.model_dump())
        if any(shapes.hops):
            hop = full.allreduce.get(2) or defaults.allreduce(gpu)
            self.hop = Positive(hop.model_dump())
            across = transfer.network()
            self.network_hop = Positive({"latency_us": across.latency_us, "link_gb_s": across.gb_s})
        self.host = Positive({name: getattr(full.host, name) for name in ("step_us", "sequence_us", "draft_pass_us")})
        self.graph_sizes = torch.tensor(graph_sizes, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        """Seconds of each step by component; see the module's docstring for the shapes."""
        sampled, *columns, passes = features.unbind(-1)
        rows = Rows(*columns)
        tokens, count = rows.decode_tokens + rows.prefill_tokens, rows.decode_rows + rows.prefill_rows
        prefill, decode = self.attention_seconds(self.shapes, rows)
        parts = {
            "gemm": self.body_seconds(self.shapes, tokens),
            "attention_prefill": prefill,
            "attention_decode": decode,
            "communication": self.communication_seconds(self.shapes, tokens),
            "sampling": self.sampling_seconds(self.shapes, sampled),
            "draft": self.draft_seconds(rows, passes),
            "overhead": (self.host.parameter("step_us") + self.host.parameter("sequence_us") * count) * 1e-6,
        }
        return torch.stack([parts[name] for name in COMPONENTS], dim=-1)

    def body_seconds(self, shapes: RankShapes, tokens: Tensor) -> Tensor:
        """All linear layers of one pass over `tokens`, experts included, and the pointwise kernels between them."""
        tokens = self.padded(tokens)
        seconds = torch.zeros_like(tokens)
        for matrix in shapes.matrices:
            term = self.bf16_gemm if matrix.bytes_per_weight == 2.0 else self.body_gemm
            seconds = seconds + matrix.count * term.seconds(matrix, tokens)
        if shapes.experts is not None:
            seconds = seconds + shapes.experts.layers * self.experts.seconds(shapes.experts, tokens)
        point = shapes.pointwise
        for moved in (*point.norms, point.rotary, point.activation):
            seconds = seconds + self.pointwise.seconds(moved * tokens, point.layers)
        return seconds

    def padded(self, tokens: Tensor) -> Tensor:
        """What a pass over `tokens` computes: as many as the next larger captured CUDA graph, where there is one.

        Attention and the LM head work on the real ones only (vLLM pads the rest of the pass).
        """
        if self.graph_sizes.numel() == 0:
            return tokens
        place = torch.searchsorted(self.graph_sizes, tokens.contiguous())
        captured = self.graph_sizes[place.clamp(max=self.graph_sizes.numel() - 1)]
        return torch.where((tokens > 0) & (place < self.graph_sizes.numel()), captured, tokens)

    def attention_seconds(self, shapes: RankShapes, rows: Rows) -> tuple[Tensor, Tensor]:
        """All layers: (share of the prefilling rows, share of the decoding ones), by the keys that each walks through."""
        prefill, decode = self.call_seconds(shapes.attention, rows)
        if shapes.window_attention is not None:
            more, further = self.call_seconds(shapes.window_attention, within_window(rows, float(shapes.window)))
            prefill, decode = prefill + more, decode + further
        return prefill, decode

    def call_seconds(self, shape: Attention, rows: Rows) -> tuple[Tensor, Tensor]:
        """The layers of one shape."""
        one_query_each = (rows.prefill_rows == 0) & (rows.decode_tokens == rows.decode_rows)
        mean = rows.decode_context / rows.decode_rows.clamp(min=1.0)
        us = torch.where(
            one_query_each,
            self.decode_attention.us(shape, rows.decode_rows, mean),
            self.prefill_attention.us(shape, rows),
        )
        seconds = torch.where(rows.decode_rows + rows.prefill_rows > 0, shape.layers * us * 1e-6, torch.zeros_like(us))
        decode_units = rows.decode_context / 128.0 + 0.5 * rows.decode_rows
        share = rows.prefill_units / (rows.prefill_units + decode_units).clamp(min=1e-9)
        return seconds * share, seconds * (1.0 - share)

    def allreduce_seconds(self, shapes: RankShapes, tokens: Tensor) -> Tensor:
        """Ring all-reduce: `2 (n - 1) / n` times the message over one rank's link, plus a latency, per all-reduce."""
        if shapes.allreduces == 0:
            return torch.zeros_like(tokens)
        ranks = shapes.tensor_parallel
        moved = 2.0 * (ranks - 1) / ranks * shapes.message_bytes_per_token * self.padded(tokens)
        return shapes.allreduces * (
            self.allreduce.parameter("latency_us") * 1e-6 + moved / (self.allreduce.parameter("link_gb_s") * 1e9)
        )

    def communication_seconds(self, shapes: RankShapes, tokens: Tensor) -> Tensor:
        """All-reduces, and the sends to the next pipeline stage.

        A send is hidden states and residual (two messages of bf16; vLLM's IntermediateTensors), of which each rank of a
        tensor-parallel group sends its share; the receivers gather the rest from each other (`send_tensor_dict` with an
        all_gather_group). Latency and link between two GPUs are those of an all-reduce over two: as many bytes.
        """
        seconds = self.allreduce_seconds(shapes, tokens)
        ranks = shapes.tensor_parallel
        message = shapes.message_bytes_per_token * self.padded(tokens)
        for count, hop in zip(shapes.hops, (self.hop, self.network_hop) if any(shapes.hops) else (), strict=False):
            send = hop.parameter("latency_us") * 1e-6 + message / ranks / (hop.parameter("link_gb_s") * 1e9)
            if ranks > 1:
                gathered = (ranks - 1) / ranks * message / (self.allreduce.parameter("link_gb_s") * 1e9)
                send = send + self.allreduce.parameter("latency_us") * 1e-6 + gathered
            seconds = seconds + count * 2.0 * send
        return seconds

    def head_seconds(self, shapes: RankShapes, positions: Tensor) -> Tensor:
        """LM head over the positions that need logits."""
        if shapes.head is None:
            return torch.zeros_like(positions)
        return self.bf16_gemm.seconds(shapes.head, positions)

    def sampling_seconds(self, shapes: RankShapes, positions: Tensor) -> Tensor:
        """LM head, then the sampler over the logits (float32) of every position, on the whole vocabulary (logits are gathered)."""
        logits = shapes.vocab * shapes.tensor_parallel * 4.0 * positions
        return self.head_seconds(shapes, positions) + self.sampler.seconds(logits, 1.0, positions)

    def draft_seconds(self, rows: Rows, passes: Tensor) -> Tensor:
        """The drafter at the step's end: its first pass over all the step's tokens (it needs their KV too), then
        `passes - 1` over one token per row. Greedy drafting: LM head, no sampler.
        """
        tokens, count = rows.decode_tokens + rows.prefill_tokens, rows.decode_rows + rows.prefill_rows
        if self.drafter is None:
            return torch.zeros_like(tokens)
        shapes = self.drafter.shapes
        launch = self.host.parameter("draft_pass_us") * 1e-6
        prefill, decode = self.attention_seconds(shapes, rows)
        head = self.head_seconds(shapes, count) + launch
        first = self.body_seconds(shapes, tokens) + self.allreduce_seconds(shapes, tokens) + prefill + decode + head
        mean = (rows.decode_context + rows.prefill_context) / count.clamp(min=1.0)
        attention = shapes.attention.layers * self.decode_attention.us(shapes.attention, count, mean) * 1e-6
        if shapes.window_attention is not None:
            seen = mean.clamp(max=float(shapes.window))
            us = self.decode_attention.us(shapes.window_attention, count, seen)
            attention = attention + shapes.window_attention.layers * us * 1e-6
        later = self.body_seconds(shapes, count) + self.allreduce_seconds(shapes, count) + attention + head
        return torch.where(passes > 0, first + (passes - 1).clamp(min=0) * later, torch.zeros_like(first))
