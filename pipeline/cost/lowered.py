"""The cost model as the replay loop wants it: tables over small integers and a few coefficients.

Everything in `StepCostModel` but attention is a function of one integer (tokens, rows or sampled positions): these index tables,
evaluated by the torch module itself in one batch. Attention of one-query rows is linear between the nodes of a table over rows
and contexts; of other calls it is the law itself, with its constants. So nothing is approximated: a lowered step equals the torch
step to rounding (tested to 1e-6, in practice 1e-14).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cost.attention import CONTEXT_NODES, TILE_KEYS, TILE_QUERIES, Rows
from pipeline.cost.model import StepCostModel
from pipeline.cost.shapes import Attention
from pipeline.jit import inlined, njit

Floats = NDArray[np.float64]


class MixedAttention(NamedTuple):
    """Attention calls with a row of several queries, all layers of a shape; constants of `attention.py` in seconds."""

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
    packs_groups: float  # 1 = such heads are tiled together
    spill_low: float
    spill_high: float
    spilled_per_key: float  # KV of one head over L2
    traffic: float  # seconds per key
    offset: float
    sharpness: float
    sms: float


(
    LAUNCH, BLOCK, UNIT, QUERY, EMPTY, LONGEST_BLOCK, LONGEST_UNIT, STALL, TOUCH, GROUP, PACKS_GROUPS, SPILL_LOW, SPILL_HIGH,
    SPILLED_PER_KEY, TRAFFIC, OFFSET, SHARPNESS, SMS,
) = range(len(MixedAttention._fields))  # fmt: skip
"""Places of the fields above in a row of `LoweredCost.mixed`."""

FULL, WINDOW, DRAFT_FULL, DRAFT_WINDOW = range(4)
"""Whose attention: layers of the target that see everything, and that see a window; the same of the drafter."""

NODES = np.array(CONTEXT_NODES)
ROOT_OF_HALF = math.sqrt(0.5)


class LoweredCost(NamedTuple):
    """Seconds by table look-up. Index 0 of each table is a step without such tokens and is never read.

    Few fields, because compiled calls copy every one of them: the attentions of the four kinds above lie in one array each.
    """

    gemm: Floats  # [max_tokens + 1]
    communication: Floats  # [max_tokens + 1]
    sampling: Floats  # [max_sampled + 1]
    draft_first: Floats  # [max_tokens + 1], without attention and head
    draft_row: Floats  # [max_rows + 1]: the head of the first pass
    draft_later: Floats  # [max_rows + 1]: body and head of each later pass, without attention
    decode: Floats  # [4, max_rows + 1, N]: attention of one-query rows at N contexts, all layers
    mixed: Floats  # [4, len(MixedAttention._fields)]
    window: float  # tokens that windowed layers see; 0 = no such layers
    draft_window: float
    draft_share: (
        float  # attention of the first draft pass over the target's where heads are alike; 0 = computed by itself
    )
    overhead_step: float
    overhead_row: float


def lower(model: StepCostModel, *, max_tokens: int, max_rows: int, max_sampled: int) -> LoweredCost:
    """Tabulate `model` for every count up to the engine's limits. Takes tens of milliseconds."""
    with torch.no_grad():
        tokens = torch.arange(max_tokens + 1, dtype=torch.float64)
        rows = torch.arange(max_rows + 1, dtype=torch.float64)
        sampled = torch.arange(max_sampled + 1, dtype=torch.float64)
        target, drafter = model.shapes, None if model.drafter is None else model.drafter.shapes
        nothing = np.zeros(1)
        draft_first, draft_row, draft_later = nothing, nothing, nothing
        kinds = [target.attention, target.window_attention, None, None]
        if drafter is not None:
            launch = model.host.parameter("draft_pass_us") * 1e-6
            head = model.head_seconds(drafter, rows)
            body = model.body_seconds(drafter, tokens) + model.allreduce_seconds(drafter, tokens)
            draft_first, draft_row = (body + launch).numpy(), head.numpy()
            later = model.body_seconds(drafter, rows) + model.allreduce_seconds(drafter, rows) + head + launch
            draft_later = later.numpy()
            kinds[DRAFT_FULL:] = [drafter.attention, drafter.window_attention]
        # The tables of a kind that the model lacks are never read: its place is the target's.
        shapes = [target.attention if shape is None else shape for shape in kinds]
        return LoweredCost(
            gemm=model.body_seconds(target, tokens).numpy(),
            communication=model.communication_seconds(target, tokens).numpy(),
            sampling=model.sampling_seconds(target, sampled).numpy(),
            draft_first=draft_first,
            draft_row=draft_row,
            draft_later=draft_later,
            decode=np.stack([_decode_table(model, shape, max_rows) for shape in shapes]),
            mixed=np.array([_mixed_constants(model, shape) for shape in shapes]),
            window=float(target.window),
            draft_window=0.0 if drafter is None else float(drafter.window),
            draft_share=0.0 if drafter is None else _draft_share(drafter.attention, target.attention),
            overhead_step=model.host.parameter("step_us").item() * 1e-6,
            overhead_row=model.host.parameter("sequence_us").item() * 1e-6,
        )


def _draft_share(drafter: Attention, target: Attention) -> float:
    """The laws are the same and proportional to layers: where the drafter has the target's heads, its first pass is a share."""
    return drafter.layers / target.layers if drafter == replace(target, layers=drafter.layers) else 0.0


def _decode_table(model: StepCostModel, shape: Attention, max_rows: int) -> Floats:
    """[max_rows + 1, N] seconds of one query in every row, all layers."""
    sequences = torch.arange(max_rows + 1, dtype=torch.float64).clamp(min=1.0)
    us = model.decode_attention.at_nodes(shape, sequences[:, None], model.decode_attention.nodes[None, :])
    return (shape.layers * 1e-6 * us).numpy()


def _mixed_constants(model: StepCostModel, shape: Attention) -> MixedAttention:
    law = model.prefill_attention
    constant = {name: law.parameter(name).item() for name in law.log_parameters}
    scale = shape.layers * 1e-6
    over_sms = scale * shape.q_heads / law.sms
    unit = constant["unit_us"] * shape.flops_per_pair / 512.0
    bandwidth = constant["bandwidth_gb_s"] * 1e3
    per_head = shape.kv_bytes / shape.kv_heads
    return MixedAttention(
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
        packs_groups=float(law.packs_groups),
        spill_low=constant["spill_low"],
        spill_high=constant["spill_low"] + constant["spill_high"],
        spilled_per_key=per_head / law.l2_bytes,
        traffic=scale * shape.kv_bytes / bandwidth,
        offset=scale * constant["offset_us"],
        sharpness=max(1.0, constant["sharpness"]),
        sms=float(law.sms),
    )


@inlined
def decode_seconds(decode: Floats, kind: int, rows: int, mean_context: float) -> float:
    """One query in every row: linear between the nodes around the mean context."""
    fraction, exponent = math.frexp(mean_context)  # nodes are powers of the root of 2; a logarithm takes longer
    low = min(NODES.shape[0] - 2, max(0, 2 * exponent - (2 if fraction < ROOT_OF_HALF else 1)))
    share = (mean_context - NODES[low]) / (NODES[low + 1] - NODES[low])
    return float(decode[kind, rows, low] * (1.0 - share) + decode[kind, rows, low + 1] * share)


@njit
def mixed_seconds(
    mixed: Floats,
    kind: int,
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
) -> float:
    """Several queries in at least one row; see `PrefillAttention`."""
    sequences = decode_rows + prefill_rows
    queries = prefill_tokens + (decode_tokens if decode_tokens > decode_rows else 0)
    decode_units = decode_context / TILE_KEYS + 0.5 * decode_rows
    working, group = 1.0, mixed[kind, GROUP]
    if mixed[kind, PACKS_GROUPS] > 0.0:
        working = max(1.0, decode_tokens / max(1, decode_rows) * group / TILE_QUERIES) / group
        group = 1.0
    tiles = decode_rows + prefill_tiles
    load = (
        mixed[kind, BLOCK] * (working * decode_rows + prefill_tiles)
        + mixed[kind, UNIT] * (working * decode_units + prefill_units)
        + mixed[kind, QUERY] * queries
        + mixed[kind, EMPTY] * max(0, sequences * tiles_most - tiles)
    )
    longest_units = max(decode_longest / TILE_KEYS + 0.5, prefill_longest)
    longest = mixed[kind, LONGEST_BLOCK] + mixed[kind, LONGEST_UNIT] * longest_units
    makespan = max(load + 0.5 * longest, longest)
    context = decode_context + prefill_context
    low, high = mixed[kind, SPILL_LOW], mixed[kind, SPILL_HIGH]
    spilled = min(1.0, max(0.0, (context * mixed[kind, SPILLED_PER_KEY] - low) / (high - low)))
    again = 1.0 + spilled * (group - 1.0) * min(1.0, sequences / mixed[kind, SMS])
    at_once = min(group, max(1.0, mixed[kind, SMS] / tiles))
    few = at_once / group * sequences / tiles
    makespan *= 1.0 + mixed[kind, STALL] * max(0.0, mixed[kind, TOUCH] / at_once - 0.9) * few
    traffic = mixed[kind, TRAFFIC] * context * again + mixed[kind, OFFSET]
    larger, ratio = max(makespan, traffic, 1e-30), min(makespan, traffic)
    if ratio > 0.0:
        p = mixed[kind, SHARPNESS]
        larger *= math.exp(math.log1p(math.exp(p * math.log(ratio / larger))) / p)
    return float(mixed[kind, LAUNCH] + larger)


@njit
def windowed_seconds(
    decode: Floats,
    mixed: Floats,
    kind: int,
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
    """Layers that see the last `window` keys, see `within_window`: (share of the prefilling rows, share of the decoding ones)."""
    context = min(decode_context, window * decode_rows)
    if prefill_rows == 0 and decode_tokens == decode_rows:
        return 0.0, decode_seconds(decode, kind, decode_rows, context / decode_rows)
    most_units = window / TILE_KEYS + 1.0
    units = min(prefill_units, most_units * prefill_tiles)
    seconds = mixed_seconds(
        mixed,
        kind,
        decode_rows,
        decode_tokens,
        context,
        min(decode_longest, window),
        prefill_rows,
        prefill_tokens,
        min(prefill_context, window * prefill_rows + prefill_tokens),
        prefill_tiles,
        units,
        min(prefill_longest, most_units),
        tiles_most,
    )
    share = units / (units + context / TILE_KEYS + 0.5 * decode_rows)
    return seconds * share, seconds * (1.0 - share)


@njit
def draft_seconds(
    cost: LoweredCost,
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
    of_target: float,
) -> float:
    """The drafter's passes, see `StepCostModel.draft_seconds`; `of_target`: attention of the target's full layers."""
    tokens, rows = decode_tokens + prefill_tokens, decode_rows + prefill_rows
    if cost.draft_share > 0.0:
        first = cost.draft_share * of_target
    elif prefill_rows == 0 and decode_tokens == decode_rows:
        first = decode_seconds(cost.decode, DRAFT_FULL, decode_rows, decode_context / decode_rows)
    else:
        first = mixed_seconds(
            cost.mixed,
            DRAFT_FULL,
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
    later = 0.0
    if draft_passes > 1:
        later = cost.draft_later[rows] + decode_seconds(cost.decode, DRAFT_FULL, rows, mean)
    if cost.draft_window > 0.0:
        of_prefill, of_decode = windowed_seconds(
            cost.decode,
            cost.mixed,
            DRAFT_WINDOW,
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
        first += of_prefill + of_decode
        later += decode_seconds(cost.decode, DRAFT_WINDOW, rows, min(mean, cost.draft_window))
    return float(cost.draft_first[tokens] + first + cost.draft_row[rows] + (draft_passes - 1) * later)


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
    if prefill_rows == 0 and decode_tokens == decode_rows:
        prefill, decode = 0.0, decode_seconds(cost.decode, FULL, decode_rows, decode_context / decode_rows)
    else:
        seconds = mixed_seconds(
            cost.mixed,
            FULL,
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
        share = prefill_units / (decode_context / TILE_KEYS + 0.5 * decode_rows + prefill_units)
        prefill, decode = seconds * share, seconds * (1.0 - share)
    of_full_layers = prefill + decode
    if cost.window > 0.0:
        of_prefill, of_decode = windowed_seconds(
            cost.decode,
            cost.mixed,
            WINDOW,
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
        prefill += of_prefill
        decode += of_decode
    draft = 0.0
    if draft_passes > 0:
        draft = draft_seconds(
            cost,
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
            draft_passes,
            of_full_layers,
        )
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
