"""`preplay estimate --tiers`: the time to load a prefix's KV from each tier, or from another replica, against computing it again.

The prompt is one context long and alone. With n of its tokens loaded, the rest (one token at least) is still computed, after them:

    saved(n) = prefill(context) - prefill(context - n, after n)

so loading pays where `transfer_seconds(n tokens) < saved(n)`. What it saves is less than prefill(n) would take: the rest of the
prompt reads the weights all the same and attends to the loaded tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.cost.build import Hardware, build_hardware
from pipeline.cost.transfer import Path, paths, transfer_seconds
from pipeline.estimate import check_asked, features_of, prefill_step, table_rows
from schemas import hardware
from schemas.hardware import GIB
from schemas.study import Scenario

TIER_DIGITS = {"gb_s": 1, "kv_gib": 2, "load_ms": 2, "recompute_ms": 2}
"""Decimals in a table."""


def tier_rows(scenario: Scenario, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row per context and path (`pipeline/cost/transfer.py`), None where the KV pool can't hold the context.

    Raises CatalogError, CapacityError and StudyError as `estimate` does.
    """
    check_asked(scenario, (), contexts, None)
    built = build_hardware(scenario)
    gpus = scenario.fleet.gpus_per_replica
    rows = []
    for context in dict.fromkeys(contexts):
        fits = context < built.capacity.pool_tokens
        counts = block_counts((context - 1) // built.capacity.block_tokens) if fits else []
        saved = saved_seconds(built, context, counts, scenario.engine.max_batched_tokens)
        for path in paths(hardware.gpu(scenario.fleet.gpu)):
            loads = [load_seconds(built, path, blocks, gpus) for blocks in counts]
            rows.append(
                {
                    "context": context,
                    "tier": path.name,
                    "basis": path.basis,
                    "gb_s": path.gb_s,
                    "kv_gib": counts[-1] * _block_bytes(built) * gpus / GIB if counts else None,
                    "load_ms": 1e3 * loads[-1] if counts else None,
                    "recompute_ms": 1e3 * saved[-1] if counts else None,
                    "break_even_tokens": break_even(counts, loads, saved, built.capacity.block_tokens),
                }
            )
    return rows


def tier_table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a terminal: rounded, "never" where loading is slower at the context's end."""
    shown = table_rows(rows, 1, TIER_DIGITS)
    for row in shown:
        if row["load_ms"] is not None and row["break_even_tokens"] is None:
            row["break_even_tokens"] = "never"
    return shown


def block_counts(most: int) -> list[int]:
    """1 to 16, then in steps of about 10 %, and `most`: where a break-even is looked for."""
    counts = [float(each) for each in range(1, 17)]
    while counts[-1] < most:
        counts.append(1.1 * counts[-1])
    return sorted({min(most, round(each)) for each in counts} - {0})


def saved_seconds(built: Hardware, context: int, counts: Sequence[int], max_batched_tokens: int) -> list[float]:
    """What each number of loaded blocks takes off the prompt's computation."""
    pasts = [0, *(blocks * built.capacity.block_tokens for blocks in counts)]
    steps, owner = [], []
    for place, past in enumerate(pasts):
        for start in range(past, context, max_batched_tokens):
            steps.append(prefill_step(start, min(max_batched_tokens, context - start)))
            owner.append(place)
    with torch.no_grad():
        seconds: Tensor = built.cost_model(features_of(steps)).sum(-1)
    whole, *rest = torch.zeros(len(pasts), dtype=torch.float64).index_add_(0, torch.tensor(owner), seconds).tolist()
    return [whole - each for each in rest]


def load_seconds(built: Hardware, path: Path, blocks: int, gpus: int) -> float:
    """So many blocks onto all GPUs of a replica, one message a block and GPU."""
    return transfer_seconds(path, blocks * _block_bytes(built), blocks, gpus)


def break_even(counts: Sequence[int], loads: Sequence[float], saved: Sequence[float], block_tokens: int) -> int | None:
    """The fewest tokens from which on loading is never slower, to about 10 %; None where it is slower at the context's end."""
    found = None
    for blocks, load, save in zip(reversed(counts), reversed(loads), reversed(saved), strict=True):
        if load >= save:
            break
        found = blocks * block_tokens
    return found


def _block_bytes(built: Hardware) -> float:
    """Of one block on one GPU."""
    return built.capacity.kv_bytes_per_token * built.capacity.block_tokens
