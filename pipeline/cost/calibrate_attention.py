"""Fitting the attention terms: mixed calls, prefill calls, decode calls."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from torch import Tensor

from pipeline.cost import defaults
from pipeline.cost.attention import REFERENCE_KV_BYTES, TILE_KEYS, TILE_QUERIES, DecodeAttention, PrefillAttention, Rows
from pipeline.cost.fit import column, descend, every_other, held_out, rounded, thinned
from pipeline.cost.shapes import Attention
from schemas.calibration import AttentionTerm, DecodeTerm, HeldOut, Residual
from schemas.hardware import Gpu

LLAMA_8B = Attention(layers=1, q_heads=32, kv_heads=8, reads=4, kv_bytes=REFERENCE_KV_BYTES, flops_per_pair=512)


def mixed_rows(chunk: np.ndarray, past: np.ndarray, decodes: np.ndarray, context: np.ndarray) -> Rows:
    """Features of calls with one prefill chunk (0 = none) after `past` tokens and `decodes` rows at `context` cached tokens."""
    tiles = -(-chunk // TILE_QUERIES)
    units = np.array([_units(int(p), int(c)) for p, c in zip(past, chunk, strict=True)])
    keys = context + 1
    columns = (
        decodes,
        decodes,
        decodes * keys,
        np.where(decodes > 0, keys, 0),
        (chunk > 0).astype(int),
        chunk,
        np.where(chunk > 0, past + chunk, 0),
        tiles,
        units,
        np.where(chunk > 0, -(-(past + chunk) // TILE_KEYS), 0),
        np.maximum(tiles, np.minimum(decodes, 1)),
    )
    return Rows(*(torch.tensor(np.asarray(column), dtype=torch.float64) for column in columns))


def _units(past: int, chunk: int) -> int:
    return sum(
        -(-(past + min(chunk, tile)) // TILE_KEYS) for tile in range(TILE_QUERIES, chunk + TILE_QUERIES, TILE_QUERIES)
    )


def _profile_rows(table: pl.DataFrame) -> Rows:
    return mixed_rows(*(table[name].to_numpy() for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")))


def fit_mixed_attention(table: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> AttentionTerm:
    """From calls with a prefill chunk, most of them with decoding rows beside it."""
    table = table.filter(pl.col("prefill_chunk") > 0)
    held = pl.col("prefill_chunk").is_in([32, 128, 512]) | pl.col("n_decode").is_in([2, 16, 64])
    train, test = table.filter(~held), table.filter(held)
    start = defaults.attention(gpu)
    term = _mixed_of(train, gpu, start)
    serving = test.filter(
        (pl.col("n_decode") >= 16) & pl.col("kv_decode").is_between(256, 2048) & (pl.col("kv_prefill") <= 2048)
    )
    for split, rows in (("chunks and batches held out", test), ("of these, serving sizes", serving)):
        with torch.no_grad():
            us = PrefillAttention(term, gpu.sms, gpu.l2_mb).us(LLAMA_8B, _profile_rows(rows))
        errors.append(held_out("attention, mixed calls", split, us, column(rows, "us")))
    return _mixed_of(table, gpu, term)


def _mixed_of(table: pl.DataFrame, gpu: Gpu, start: AttentionTerm) -> AttentionTerm:
    """Rows weigh by the root of their time: small calls are many in such a profile, large ones make a run's time."""
    thin = thinned(table)
    rows, us = _profile_rows(thin), column(thin, "us")
    module = PrefillAttention(start, gpu.sms, gpu.l2_mb)
    descend(module, lambda: module.us(LLAMA_8B, rows), us, weights=us.sqrt(), steps=700)
    return AttentionTerm.model_validate(rounded(module) | {"packs_groups": module.packs_groups})


def fit_prefill_attention(table: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> AttentionTerm:
    """From prefill calls of many shapes: they say nothing of KV traffic and of decoding rows, which stay at their defaults."""
    fitted = pl.Series(every_other(table.select("q_heads", "kv_heads", "head_dim").to_numpy()))
    start = defaults.attention(gpu)
    term = _prefill_of(table.filter(fitted), gpu, start)
    test = table.filter(~fitted)
    errors.append(
        held_out("attention, prefill", "half of the head shapes", _prefill_us(term, test, gpu), column(test, "us"))
    )
    return _prefill_of(table, gpu, term)


def _prefill_of(table: pl.DataFrame, gpu: Gpu, start: AttentionTerm) -> AttentionTerm:
    thin = thinned(table)
    us = column(thin, "us")
    module = PrefillAttention(start, gpu.sms, gpu.l2_mb)
    shape, rows = _prefill_rows(thin)
    descend(
        module,
        lambda: module.us(shape, rows),
        us,
        weights=us.sqrt(),
        steps=500,
        fixed=("empty_us", "stall", "spill_low", "spill_high", "bandwidth_gb_s", "sharpness", "offset_us"),
    )
    return AttentionTerm.model_validate(rounded(module) | {"packs_groups": module.packs_groups})


def _prefill_us(term: AttentionTerm, table: pl.DataFrame, gpu: Gpu) -> Tensor:
    shape, rows = _prefill_rows(table)
    with torch.no_grad():
        return PrefillAttention(term, gpu.sms, gpu.l2_mb).us(shape, rows)


def _prefill_rows(table: pl.DataFrame) -> tuple[Attention, Rows]:
    """Heads and widths as tensors, one per row: the law broadcasts over them."""
    batch, prompt = table["batch"].to_numpy(), table["prompt_tokens"].to_numpy()
    tiles = -(-prompt // TILE_QUERIES)
    known = {int(each): _units(0, int(each)) for each in np.unique(prompt)}
    units = np.array([known[int(each)] for each in prompt])
    zero = np.zeros_like(batch)
    columns = (
        zero, zero, zero, zero, batch, batch * prompt, batch * prompt, batch * tiles, batch * units, -(-prompt // TILE_KEYS), tiles,
    )  # fmt: skip
    q_heads, kv_heads, width = (column(table, name) for name in ("q_heads", "kv_heads", "head_dim"))
    shape = Attention(1, q_heads, kv_heads, q_heads / kv_heads, 4.0 * kv_heads * width, 4.0 * width)  # type: ignore[arg-type]
    return shape, Rows(*(torch.tensor(np.asarray(column), dtype=torch.float64) for column in columns))


def fit_decode_profile(table: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> DecodeTerm:
    """The law, and the residual of every measured (sequences, context)."""
    table = (
        table.filter(pl.col("prefill_chunk") == 0)
        .with_columns(context=pl.col("kv_decode") + 1)
        .sort("n_decode", "context")
    )
    held = pl.col("n_decode").is_in([2, 8, 32, 128])
    term = _decode_profile_of(table.filter(~held), gpu)
    test = table.filter(held)
    with torch.no_grad():
        us = DecodeAttention(term, gpu.sms).us(LLAMA_8B, column(test, "n_decode"), column(test, "context"))
    errors.append(held_out("attention, decode calls", "every other batch size", us, column(test, "us")))
    return _decode_profile_of(table, gpu)


def _decode_profile_of(table: pl.DataFrame, gpu: Gpu) -> DecodeTerm:
    module = DecodeAttention(defaults.decode(gpu), gpu.sms)
    sequences, context, us = (column(table, name) for name in ("n_decode", "context", "us"))
    descend(
        module, lambda: module.law_us(sequences, context, REFERENCE_KV_BYTES, 8.0), us, weights=us.sqrt(), steps=400
    )
    constants = rounded(module)
    law = DecodeAttention(DecodeTerm.model_validate(constants), gpu.sms)
    rows, contexts = sorted(table["n_decode"].unique()), sorted(table["context"].unique())
    measured = {(n, c): t for n, c, t in table.select("n_decode", "context", "us").iter_rows()}
    logs = []
    for at in contexts:
        known = [n for n in rows if (n, at) in measured]
        with torch.no_grad():
            us_law = law.law_us(
                torch.tensor(known, dtype=torch.float64), torch.tensor(float(at)), REFERENCE_KV_BYTES, 8.0
            )
        left = np.log(np.array([measured[n, at] for n in known]) / us_law.numpy())
        logs.append(tuple(np.round(np.interp(np.log(rows), np.log(known), left), 4).tolist()))
    residual = Residual(rows=tuple(float(n) for n in rows), sites=tuple((float(c),) for c in contexts), log=tuple(logs))
    return DecodeTerm.model_validate(constants | {"residual": residual})


def fit_decode(table: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> DecodeTerm:
    """From calls whose KV lay in L2 when it fitted there, as an engine's does not: only larger ones are used, and tiny ones,
    which measure the launch.
    """
    share = pl.col("batch") * pl.col("kv_heads") * pl.col("head_dim") * 4 * pl.col("context") / (gpu.l2_mb * 1e6)
    table = table.filter((share > 2.0) | (share < 0.02))
    fitted = pl.Series(every_other(table.select("q_heads", "kv_heads", "head_dim").to_numpy()))
    test = table.filter(~fitted)
    term = _decode_of(table.filter(fitted), gpu)
    with torch.no_grad():
        us = DecodeAttention(term, gpu.sms).law_us(*_decode_columns(test))
    errors.append(held_out("attention, decode calls beyond L2", "half of the head shapes", us, column(test, "us")))
    return _decode_of(table, gpu)


def _decode_columns(table: pl.DataFrame) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, context, kv_heads, width = (column(table, name) for name in ("batch", "context", "kv_heads", "head_dim"))
    return batch, context, 4.0 * kv_heads * width, kv_heads


def _decode_of(table: pl.DataFrame, gpu: Gpu) -> DecodeTerm:
    thin = thinned(table)
    module = DecodeAttention(defaults.decode(gpu), gpu.sms)
    columns, us = _decode_columns(thin), column(thin, "us")
    descend(module, lambda: module.law_us(*columns), us, weights=us.sqrt(), steps=400)
    return DecodeTerm.model_validate(rounded(module))
