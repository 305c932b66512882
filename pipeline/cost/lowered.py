"""The cost model as the replay loop wants it: tables over small integers and a few coefficients.

Everything in `StepCostModel` but attention is a function of one integer (tokens, rows or sampled positions): these index tables,
evaluated by the torch module itself in one batch. Attention of one-query rows is linear between the nodes of a table over rows
and contexts; of other calls it is the law itself, with its constants. So nothing is approximated: a lowered step equals the torch
step to rounding (tested to 1e-6, in practice 1e-14).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cost.attention import CONTEXT_NODES, TILE_KEYS, TILE_QUERIES, Rows
from pipeline.cost.model import StepCostModel
from pipeline.cost.shapes import Attention, RankShapes
from pipeline.jit import inlined, njit

Floats = NDArray[np.float64]


class LoweredAttention(NamedTuple):
    """The attention of one model, all layers. Constants of `pipeline/cost/attention.py` for its shape, in seconds."""

    nodes: Floats  # [N] contexts
    decode: Floats  # [max_rows + 1, N]
    launch: float
    block: float  # per thread block of every head over the SMs
    unit: float
    query: float
    empty: float
    longest_block: float  # the same for one thread block alone
    longest_unit: float
    stall: float
    touch: float  # time to fetch what the SMs touch at once, over a unit's
    group: float  # query heads that share KV
    packs_groups: bool
    spill_low: float
    spill_high: float
    spilled_per_key: float  # KV of one head over L2
    traffic: float  # seconds per key
    offset: float
    sharpness: float
    sms: float


class LoweredCost(NamedTuple):
    """Seconds by table look-up. Index 0 of each table is a step without such tokens and is never read."""

    gemm: Floats  # [max_tokens + 1]
    communication: Floats  # [max_tokens + 1]
    sampling: Floats  # [max_sampled + 1]
    draft_first: Floats  # [max_tokens + 1], without attention and head
    draft_row: Floats  # [max_rows + 1]: the head of the first pass
    draft_later: Floats  # [max_rows + 1]: body and head of each later pass, without attention
    attention: LoweredAttention
    window_attention: LoweredAttention  # of layers that see `window` tokens
    window: float  # 0 = no such layers
    draft_attention: LoweredAttention
    draft_window_attention: LoweredAttention
    draft_window: float
    overhead_step: float
    overhead_row: float


def lower(model: StepCostModel, *, max_tokens: int, max_rows: int, max_sampled: int) -> LoweredCost:
    """Tabulate `model` for every count up to the engine's limits. Takes tens of milliseconds."""
    with torch.no_grad():
        tokens = torch.arange(max_tokens + 1, dtype=torch.float64)
        rows = torch.arange(max_rows + 1, dtype=torch.float64)
        sampled = torch.arange(max_sampled + 1, dtype=torch.float64)
        shapes = model.shapes
        attention, window_attention = lower_both(model, shapes, max_rows)
        nothing = np.zeros(1)
        draft_first, draft_row, draft_later = nothing, nothing, nothing
        draft_attention, draft_window_attention, draft_window = attention, window_attention, 0
        if model.drafter is not None:
            drafter = model.drafter.shapes
            launch = model.host.parameter("draft_pass_us") * 1e-6
            head = model.head_seconds(drafter, rows)
            body = model.body_seconds(drafter, tokens) + model.allreduce_seconds(drafter, tokens)
            draft_first, draft_row = (body + launch).numpy(), head.numpy()
            later = model.body_seconds(drafter, rows) + model.allreduce_seconds(drafter, rows) + head + launch
            draft_later = later.numpy()
            draft_attention, draft_window_attention = lower_both(model, drafter, max_rows)
            draft_window = drafter.window
        return LoweredCost(
            gemm=model.body_seconds(shapes, tokens).numpy(),
            communication=model.allreduce_seconds(shapes, tokens).numpy(),
            sampling=model.sampling_seconds(shapes, sampled).numpy(),
            draft_first=draft_first,
            draft_row=draft_row,
            draft_later=draft_later,
            attention=attention,
            window_attention=window_attention,
            window=float(shapes.window),
            draft_attention=draft_attention,
            draft_window_attention=draft_window_attention,
            draft_window=float(draft_window),
            overhead_step=model.host.parameter("step_us").item() * 1e-6,
            overhead_row=model.host.parameter("sequence_us").item() * 1e-6,
        )


def lower_both(model: StepCostModel, shapes: RankShapes, max_rows: int) -> tuple[LoweredAttention, LoweredAttention]:
    """The layers that see everything, and those that see a window (the same where there are none; it is never read)."""
    full = lower_attention(model, shapes.attention, max_rows)
    if shapes.window_attention is None:
        return full, full
    return full, lower_attention(model, shapes.window_attention, max_rows)


def lower_attention(model: StepCostModel, shape: Attention, max_rows: int) -> LoweredAttention:
    """The attention of `shape` for up to `max_rows` rows."""
    law, decode = model.prefill_attention, model.decode_attention
    constant = {name: law.parameter(name).item() for name in law.log_parameters}
    scale = shape.layers * 1e-6
    over_sms = scale * shape.q_heads / law.sms
    unit = constant["unit_us"] * shape.flops_per_pair / 512.0
    bandwidth = constant["bandwidth_gb_s"] * 1e3
    sequences = torch.arange(max_rows + 1, dtype=torch.float64).clamp(min=1.0)
    table = decode.at_nodes(shape, sequences[:, None], decode.nodes[None, :])
    per_head = shape.kv_bytes / shape.kv_heads
    return LoweredAttention(
        nodes=np.array(CONTEXT_NODES),
        decode=np.ascontiguousarray((scale * table).numpy()),
        launch=scale * constant["launch_us"],
        block=over_sms * constant["block_us"],
        unit=over_sms * unit,
        query=over_sms * constant["query_us"] / TILE_QUERIES,
        empty=over_sms * constant["empty_us"],
        longest_block=scale * constant["block_us"],
        longest_unit=scale * unit,
        stall=constant["stall"],
        touch=TILE_KEYS * per_head * law.sms / bandwidth / unit,
        group=float(shape.reads),
        packs_groups=law.packs_groups,
        spill_low=constant["spill_low"],
        spill_high=constant["spill_low"] + constant["spill_high"],
        spilled_per_key=per_head / law.l2_bytes,
        traffic=scale * shape.kv_bytes / bandwidth,
        offset=scale * constant["offset_us"],
        sharpness=max(1.0, constant["sharpness"]),
        sms=float(law.sms),
    )


@inlined
def decode_seconds(attention: LoweredAttention, rows: int, mean_context: float) -> float:
    """One query in every row: linear between the nodes around the mean context."""
    nodes = attention.nodes
    low = min(nodes.shape[0] - 2, max(0, int(2.0 * math.log2(mean_context))))  # nodes are powers of the root of 2
    high = low + 1
    share = (mean_context - nodes[low]) / (nodes[high] - nodes[low])
    return float(attention.decode[rows, low] * (1.0 - share) + attention.decode[rows, high] * share)


@inlined
def attention_seconds(
    attention: LoweredAttention,
    decode_rows: int,
    decode_tokens: int,
    decode_context: float,
    decode_longest: float,
    prefill_rows: int,
    prefill_tokens: int,
    prefill_context: float,
    prefill_tiles: int,
    prefill_units: float,
    prefill_longest: float,
    tiles_most: int,
) -> tuple[float, float]:
    """(share of the prefilling rows, share of the decoding ones); see `pipeline/cost/attention.py`."""
    if prefill_rows == 0 and decode_tokens == decode_rows:
        return 0.0, decode_seconds(attention, decode_rows, decode_context / decode_rows)
    sequences = decode_rows + prefill_rows
    queries = prefill_tokens + (decode_tokens if decode_tokens > decode_rows else 0)
    decode_units = decode_context / TILE_KEYS + 0.5 * decode_rows
    working, group = 1.0, attention.group
    if attention.packs_groups:
        working = max(1.0, decode_tokens / max(1, decode_rows) * group / TILE_QUERIES) / group
        group = 1.0
    tiles = decode_rows + prefill_tiles
    load = (
        attention.block * (working * decode_rows + prefill_tiles)
        + attention.unit * (working * decode_units + prefill_units)
        + attention.query * queries
        + attention.empty * max(0, sequences * tiles_most - tiles)
    )
    longest_units = max(decode_longest / TILE_KEYS + 0.5, prefill_longest)
    longest = attention.longest_block + attention.longest_unit * longest_units
    makespan = max(load + 0.5 * longest, longest)
    context = decode_context + prefill_context
    spilled = (context * attention.spilled_per_key - attention.spill_low) / (attention.spill_high - attention.spill_low)
    spilled = min(1.0, max(0.0, spilled))
    again = 1.0 + spilled * (group - 1.0) * min(1.0, sequences / attention.sms)
    at_once = min(group, max(1.0, attention.sms / tiles))
    few = at_once / group * sequences / tiles
    makespan *= 1.0 + attention.stall * max(0.0, attention.touch / at_once - 0.9) * few
    traffic = attention.traffic * context * again + attention.offset
    larger, ratio = max(makespan, traffic, 1e-30), min(makespan, traffic)
    seconds = attention.launch + larger
    if ratio > 0.0:
        p = attention.sharpness
        seconds = attention.launch + larger * math.exp(math.log1p(math.exp(p * math.log(ratio / larger))) / p)
    share = prefill_units / (decode_units + prefill_units)
    return seconds * share, seconds * (1.0 - share)


@njit
def within_window_seconds(
    attention: LoweredAttention,
    window: float,
    decode_rows: int,
    decode_tokens: int,
    decode_context: float,
    decode_longest: float,
    prefill_rows: int,
    prefill_tokens: int,
    prefill_context: float,
    prefill_tiles: int,
    prefill_units: float,
    prefill_longest: float,
    tiles_most: int,
) -> tuple[float, float]:
    """The same for layers that see the last `window` keys; see `within_window`."""
    most_units = window / TILE_KEYS + 1.0
    return attention_seconds(
        attention,
        decode_rows,
        decode_tokens,
        min(decode_context, window * decode_rows),
        min(decode_longest, window),
        prefill_rows,
        prefill_tokens,
        min(prefill_context, window * prefill_rows + prefill_tokens),
        prefill_tiles,
        min(prefill_units, most_units * prefill_tiles),
        min(prefill_longest, most_units),
        tiles_most,
    )


@inlined
def step_components(
    cost: LoweredCost,
    sampled: int,
    decode_rows: int,
    decode_tokens: int,
    decode_context: float,
    decode_longest: float,
    prefill_rows: int,
    prefill_tokens: int,
    prefill_context: float,
    prefill_tiles: int,
    prefill_units: float,
    prefill_longest: float,
    tiles_most: int,
    draft_passes: int,
) -> tuple[float, float, float, float, float, float, float]:
    """Seconds of one step by component, in the order of COMPONENTS; the features are those of docs/replay.md."""
    tokens, rows = decode_tokens + prefill_tokens, decode_rows + prefill_rows
    prefill, decode = attention_seconds(
        cost.attention,
        decode_rows,
        decode_tokens,
        decode_context,
        decode_longest,
        prefill_rows,
        prefill_tokens,
        prefill_context,
        prefill_tiles,
        prefill_units,
        prefill_longest,
        tiles_most,
    )
    if cost.window > 0:
        more, further = within_window_seconds(
            cost.window_attention,
            cost.window,
            decode_rows,
            decode_tokens,
            decode_context,
            decode_longest,
            prefill_rows,
            prefill_tokens,
            prefill_context,
            prefill_tiles,
            prefill_units,
            prefill_longest,
            tiles_most,
        )
        prefill += more
        decode += further
    draft = 0.0
    if draft_passes > 0:
        first, second = attention_seconds(
            cost.draft_attention,
            decode_rows,
            decode_tokens,
            decode_context,
            decode_longest,
            prefill_rows,
            prefill_tokens,
            prefill_context,
            prefill_tiles,
            prefill_units,
            prefill_longest,
            tiles_most,
        )
        mean = (decode_context + prefill_context) / rows
        later = cost.draft_later[rows] + decode_seconds(cost.draft_attention, rows, mean) if draft_passes > 1 else 0.0
        if cost.draft_window > 0:
            more, further = within_window_seconds(
                cost.draft_window_attention,
                cost.draft_window,
                decode_rows,
                decode_tokens,
                decode_context,
                decode_longest,
                prefill_rows,
                prefill_tokens,
                prefill_context,
                prefill_tiles,
                prefill_units,
                prefill_longest,
                tiles_most,
            )
            first += more
            second += further
            later += decode_seconds(cost.draft_window_attention, rows, min(mean, cost.draft_window))
        draft = cost.draft_first[tokens] + first + second + cost.draft_row[rows] + (draft_passes - 1) * later
    return (
        cost.gemm[tokens],
        prefill,
        decode,
        cost.communication[tokens],
        cost.sampling[sampled],
        draft,
        cost.overhead_step + cost.overhead_row * rows,
    )


def features(rows: Rows, sampled: float, draft_passes: float) -> list[float]:
    """One step's features in the module's order."""
    return [sampled, *(float(each) for each in rows), draft_passes]
