"""Attention of one layer on one rank, for a whole step's batch in one call, as in vLLM with FlashAttention.

*Calls with a row of several queries* (a prefill chunk, a verification of drafts). Thread blocks of 64 queries of one head walk
through their keys 128 at a time and run on the SMs side by side:

    load = heads * (sum over tiles of [block_us + unit_us * keys / 128 + query_us * queries / 64] + empty_us * tiles without work)
    makespan = max(load / SMs + longest / 2, longest)
    time = launch + joined(makespan * stall, KV bytes * again / bandwidth + offset)

A decoding row among them is one tile of every query head, or where a kernel packs the heads that share KV into one tile
(FlashAttention 3 and later), of every KV head. As many tiles as the longest prompt has are launched for every row, the others end
at once. When the KV of one head outgrows L2 each of the heads that share it reads it from memory again (`again`, up to the
group's size; not where they are packed); when few blocks touch each key block its first read stalls them (`stall`). One such
call is neither the sum nor the maximum of a prefill call and a decode call.

*Calls in which every row has one query.* One block per sequence and KV head, or several that share its keys:

    time = launch + joined(KV bytes / bandwidth, wave_us * max(1, sequences * KV heads / SMs))

linear in the mean context between the nodes of a grid (`CONTEXT_NODES`), with the residual of the measured calls. The residual was
measured on one shape; other shapes are read off where sequences * KV bytes per token are the same.

Units: microseconds; contexts and queries in tokens. The constants are per GPU, see `schemas/calibration.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.cost.shapes import Attention
from pipeline.cost.terms import Positive, joined, share_between
from schemas.calibration import AttentionTerm, DecodeTerm, Residual

TILE_QUERIES = 64
TILE_KEYS = 128
UNIT_FLOPS = 4.0 * TILE_QUERIES * TILE_KEYS * 128
"""Arithmetic of one unit: 64 queries against 128 keys of a head of 128."""

REFERENCE_KV_BYTES = 4096.0
"""Per token and layer, of the shape that decode residuals were measured on: 2 x 8 heads x 128 x 2 bytes."""

CONTEXT_NODES = tuple(2.0 ** (place / 2) for place in range(44))
"""Mean contexts between which a decode call is linear: to 3 million tokens, by factors of the root of 2."""


class Rows(NamedTuple):
    """What an attention call is made of; every field a tensor of steps."""

    decode_rows: Tensor
    decode_tokens: Tensor  # query tokens, drafts included
    decode_context: Tensor  # sum over rows of keys (computed before and now)
    decode_longest: Tensor  # most keys of one row
    prefill_rows: Tensor
    prefill_tokens: Tensor
    prefill_context: Tensor
    prefill_tiles: Tensor  # tiles of 64 queries
    prefill_units: Tensor  # sum over tiles of ceil(keys / 128), the keys that the tile's last query sees
    prefill_longest: Tensor  # most units of one tile
    tiles_most: Tensor  # most tiles of one row


def within_window(rows: Rows, window: float) -> Rows:
    """The same call where every query sees its last `window` keys only: by sums over rows, so at most this if contexts differ."""
    most_units = window / TILE_KEYS + 1.0
    return rows._replace(
        decode_context=torch.minimum(rows.decode_context, window * rows.decode_rows),
        decode_longest=rows.decode_longest.clamp(max=window),
        prefill_context=torch.minimum(rows.prefill_context, window * rows.prefill_rows + rows.prefill_tokens),
        prefill_units=torch.minimum(rows.prefill_units, most_units * rows.prefill_tiles),
        prefill_longest=rows.prefill_longest.clamp(max=most_units),
    )


class PrefillAttention(Positive):
    """The law of calls with several queries in a row."""

    def __init__(self, term: AttentionTerm, sms: int, l2_mb: float) -> None:
        super().__init__({name: getattr(term, name) for name in AttentionTerm.model_fields if name != "packs_groups"})
        self.packs_groups = term.packs_groups
        self.sms = sms
        self.l2_bytes = l2_mb * 1e6

    def us(self, shape: Attention, rows: Rows) -> Tensor:
        """One layer's call; steps without prefilling or verifying rows have no meaning here."""
        group = torch.as_tensor(shape.reads, dtype=torch.float64)
        unit = self.parameter("unit_us") * (shape.flops_per_pair / 512.0)
        block, empty, query = self.parameter("block_us"), self.parameter("empty_us"), self.parameter("query_us")
        sequences = rows.decode_rows + rows.prefill_rows
        verifying = (rows.decode_tokens > rows.decode_rows).to(torch.float64)
        decode_units = rows.decode_context / TILE_KEYS + 0.5 * rows.decode_rows
        # Tiles of decoding rows that work, for each query head: all of them, or with packing their group's share of a tile.
        working = torch.ones((), dtype=torch.float64)
        if self.packs_groups:
            queries = rows.decode_tokens / rows.decode_rows.clamp(min=1.0)
            working = torch.clamp(queries * group / TILE_QUERIES, min=1.0) / group
            group = torch.ones((), dtype=torch.float64)
        tiles = rows.decode_rows + rows.prefill_tiles
        load = (
            block * (working * rows.decode_rows + rows.prefill_tiles)
            + unit * (working * decode_units + rows.prefill_units)
            + query * (rows.prefill_tokens + verifying * rows.decode_tokens) / TILE_QUERIES
            + empty * (sequences * rows.tiles_most - tiles).clamp(min=0.0)
        )
        longest = block + unit * torch.maximum(rows.decode_longest / TILE_KEYS + 0.5, rows.prefill_longest)
        makespan = torch.maximum(load * shape.q_heads / self.sms + 0.5 * longest, longest)
        context = rows.decode_context + rows.prefill_context
        bandwidth = self.parameter("bandwidth_gb_s") * 1e3  # bytes per microsecond
        of_one_head = context * shape.kv_bytes / shape.kv_heads
        low, high = self.parameter("spill_low"), self.parameter("spill_low") + self.parameter("spill_high")
        spilled = share_between(of_one_head / self.l2_bytes, low, high)
        again = 1.0 + spilled * (group - 1.0) * torch.clamp(sequences / self.sms, max=1.0)
        at_once = torch.minimum(torch.clamp(self.sms / tiles.clamp(min=1.0), min=1.0), group)
        touch = TILE_KEYS * shape.kv_bytes / shape.kv_heads * self.sms / bandwidth / (unit * at_once)
        few = at_once / group * sequences / tiles.clamp(min=1.0)
        stall = 1.0 + self.parameter("stall") * (touch - 0.9).clamp(min=0.0) * few
        traffic = context * shape.kv_bytes * again / bandwidth + self.parameter("offset_us")
        return self.parameter("launch_us") + joined(makespan * stall, traffic, self.parameter("sharpness"))


class DecodeAttention(Positive):
    """The law of calls with one query in every row."""

    def __init__(self, term: DecodeTerm, sms: int) -> None:
        super().__init__({name: getattr(term, name) for name in DecodeTerm.model_fields if name != "residual"})
        self.sms = sms
        self.residual = None if term.residual is None else DecodeResidual(term.residual)
        self.nodes = torch.tensor(CONTEXT_NODES, dtype=torch.float64)

    def us(self, shape: Attention, sequences: Tensor, mean_context: Tensor) -> Tensor:
        """One layer's call, linear in the context between the nodes."""
        place = torch.searchsorted(self.nodes, mean_context.contiguous()).clamp(1, self.nodes.numel() - 1)
        low, high = self.nodes[place - 1], self.nodes[place]
        share = (mean_context - low) / (high - low)
        return self.at_nodes(shape, sequences, low) * (1.0 - share) + self.at_nodes(shape, sequences, high) * share

    def at_nodes(self, shape: Attention, sequences: Tensor, context: Tensor) -> Tensor:
        """The law with its residual."""
        us = self.law_us(sequences, context, shape.kv_bytes, shape.kv_heads)
        if self.residual is not None:
            us = us * self.residual(sequences * shape.kv_bytes / REFERENCE_KV_BYTES, context).exp()
        return us

    def law_us(self, sequences: Tensor, context: Tensor, kv_bytes: Tensor | float, kv_heads: Tensor | float) -> Tensor:
        """Microseconds without the residual; tensors broadcast."""
        traffic = sequences * context * kv_bytes / (self.parameter("bandwidth_gb_s") * 1e3)
        waves = torch.clamp(sequences * kv_heads / self.sms, min=1.0)
        return self.parameter("launch_us") + joined(
            traffic, self.parameter("wave_us") * waves, self.parameter("sharpness")
        )


class DecodeResidual:
    """log(measured / law): bilinear in log sequences and log context, the nearest measured value beyond the grid."""

    def __init__(self, residual: Residual) -> None:
        self.sequences = torch.tensor(residual.rows, dtype=torch.float64).log()
        self.context = torch.tensor([site[0] for site in residual.sites], dtype=torch.float64).log()
        self.log = torch.tensor(residual.log, dtype=torch.float64)  # [context, sequences]

    def __call__(self, sequences: Tensor, context: Tensor) -> Tensor:
        """At each pair; tensors broadcast."""
        sequences, context = sequences + 0.0 * context, context + 0.0 * sequences
        column, x = _between(self.sequences, sequences.log())
        row, y = _between(self.context, context.log())
        low = self.log[row - 1, column - 1] * (1.0 - x) + self.log[row - 1, column] * x
        high = self.log[row, column - 1] * (1.0 - x) + self.log[row, column] * x
        return low * (1.0 - y) + high * y


def _between(grid: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Right neighbour in an ascending grid, and how far towards it; clamped to the grid."""
    clamped = value.clamp(float(grid[0]), float(grid[-1])).contiguous()
    right = torch.searchsorted(grid, clamped).clamp(1, grid.numel() - 1)
    return right, (clamped - grid[right - 1]) / (grid[right] - grid[right - 1])
