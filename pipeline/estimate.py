"""`preplay estimate`: one model on one replica, without a trace: what fits, how fast, and bound by what.

The step that decodes `batch` sequences of `context` tokens is one row of the cost model's torch module. Its autograd says what
limits it: elasticities, d log(step) / d log(constant), summed over constants of the same kind (`KINDS`). A step is made of sums,
maxima and p-norms of times and of bytes or FLOPs over rates, so it is homogeneous of degree one: 1 % slower in everything is 1 %
longer. Hence elasticities to times, minus elasticities to rates, add up to one: they are shares of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.cost.attention import TILE_KEYS, TILE_QUERIES
from pipeline.cost.build import Hardware, build_hardware, notes_of, provenance
from pipeline.cost.elasticity import RATE_KINDS, TIME_KINDS, elasticities, shares
from pipeline.cost.model import FEATURES
from pipeline.cost.stages import round_seconds
from schemas import hardware
from schemas.errors import StudyError
from schemas.outcome import COMPONENTS
from schemas.study import Scenario
from schemas.validation import validated

LADDER = (1, 8, 32, 128)
"""Batches where none are asked for, as far as they fit; the most that fit comes after them."""

CONTEXTS = (1024, 8192)

PARTS: dict[str, tuple[str, ...]] = {
    "gemm": ("gemm",),
    "attention": ("attention_prefill", "attention_decode"),
    "communication": ("communication",),
    "sampling": ("sampling",),
    "overhead": ("overhead",),
}
"""Components as they are printed. There is no drafter."""

ELASTICITIES = tuple(f"elasticity_{kind}" for kind in (*RATE_KINDS, *TIME_KINDS))
DIGITS = {"tpot_ms": 3, "tokens_s": 1, "tokens_s_per_gpu": 1, "fleet_tokens_s": 1, "ttft_ms": 2} | {
    f"{part}_percent": 1 for part in PARTS
}
"""Decimals in a table; JSON and CSV are not rounded."""


def scenario_of(
    model: str,
    gpu: str,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    replicas: int = 1,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    calibration: str = "auto",
    **engine: float,
) -> Scenario:
    """The scenario that the command's options describe; `engine`: keys of a study's engine table. Raises StudyError."""
    fleet = {
        "gpu": gpu, "replicas": replicas, "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel,
        "expert_parallel": expert_parallel, "calibration": calibration,
    }  # fmt: skip
    served = {"name": model, "weight_dtype": weight_dtype, "kv_dtype": kv_dtype}
    return validated(Scenario, {"fleet": fleet, "model": served, "engine": engine}, error=StudyError)


def estimate(
    scenario: Scenario,
    batches: Sequence[int] = (),
    contexts: Sequence[int] = CONTEXTS,
    prompt: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, one row per context and batch). Columns of rows that don't fit the KV pool are None.

    `batches` () = `LADDER` and the most that fit; `prompt` None = as long as the context. The scenario's speculation, prefix
    cache and workload play no part.

    Raises CatalogError (unknown name, heads that can't be divided), CapacityError (the model does not fit) and StudyError
    (a context that the model doesn't have, a batch that the engine never runs).
    """
    check_asked(scenario, batches, contexts, prompt)
    built = build_hardware(scenario)
    rows = []
    for context in dict.fromkeys(contexts):
        most = min(sequences_that_fit(built, context), scenario.engine.max_sequences)
        chosen = tuple(dict.fromkeys(batches)) or (*(each for each in LADDER if each < most), max(1, most))
        of_model = hardware.model(scenario.model.name).max_context
        tokens = min(context, of_model - 1) if prompt is None else prompt  # a prompt leaves room for one more token
        ttft_s = ttft_seconds(built, tokens, scenario.engine.max_batched_tokens)
        fitting = [batch for batch in chosen if batch <= most]
        decoded = iter(_decoded(built, fitting, context))
        for batch in chosen:
            row: dict[str, Any] = {"batch": batch, "context": context, "prompt": tokens} | dict.fromkeys(_MEASURED)
            if batch <= most:
                row |= _measured(scenario, batch, *next(decoded), ttft_s)
            rows.append(row)
    return _summary(scenario, built, contexts), rows


def sequences_that_fit(built: Hardware, context: int) -> int:
    """How many sequences of `context` tokens the KV pool holds, by whole blocks."""
    return built.capacity.pool_blocks // -(-context // built.capacity.block_tokens)


def ttft_seconds(built: Hardware, prompt: int, max_batched_tokens: int) -> float | None:
    """From the arrival at an idle engine to the first token: chunks of at most `max_batched_tokens`, one step each.

    None where the KV pool can't hold the prompt and a token.
    """
    if prompt >= built.capacity.pool_tokens:
        return None
    pasts = range(0, prompt, max_batched_tokens)
    steps = [prefill_step(past, min(max_batched_tokens, prompt - past)) for past in pasts]
    with torch.no_grad():
        seconds: Tensor = built.cost_model(features_of(steps))
    return float(seconds.sum())


def decode_step(batch: int, context: int) -> dict[str, float]:
    """Features of the step that computes token number `context` of each of `batch` sequences."""
    return {
        "sampled": batch,
        "decode_rows": batch,
        "decode_tokens": batch,
        "decode_context": batch * context,
        "decode_longest": context,
        "tiles_most": 1,
    }


def prefill_step(past: int, tokens: int) -> dict[str, float]:
    """Features of the step that computes `tokens` tokens of one prompt, `past` of which are there already."""
    tiles = -(-tokens // TILE_QUERIES)
    keys = past + np.minimum(tokens, TILE_QUERIES * np.arange(1, tiles + 1))  # that each tile's last query sees
    return {
        "sampled": 1,
        "prefill_rows": 1,
        "prefill_tokens": tokens,
        "prefill_context": past + tokens,
        "prefill_tiles": tiles,
        "prefill_units": int((-(-keys // TILE_KEYS)).sum()),
        "prefill_longest": -(-(past + tokens) // TILE_KEYS),
        "tiles_most": tiles,
    }


def table_rows(
    rows: Iterable[dict[str, Any]], replicas: int, digits: Mapping[str, int] = DIGITS
) -> list[dict[str, Any]]:
    """Rows for a terminal: rounded, without elasticities, without the fleet where it is one replica."""
    hidden = {*ELASTICITIES, *(() if replicas > 1 else ("fleet_tokens_s",))}
    return [
        {
            name: round(value, digits[name]) if name in digits and value is not None else value
            for name, value in row.items()
            if name not in hidden
        }
        for row in rows
    ]


_MEASURED = (
    "tpot_ms", "tokens_s", "tokens_s_per_gpu", "fleet_tokens_s", "ttft_ms", *(f"{part}_percent" for part in PARTS), "bound_by",
    *ELASTICITIES,
)  # fmt: skip
"""Columns of a row besides what was asked."""


def check_asked(scenario: Scenario, batches: Sequence[int], contexts: Sequence[int], prompt: int | None) -> None:
    """Raises StudyError for what the model or the engine doesn't have."""
    model, most = hardware.model(scenario.model.name), scenario.engine.max_sequences
    asked = {"batch": batches, "context": contexts, "prompt": () if prompt is None else (prompt,)}
    for place, values in asked.items():
        if any(value < 1 for value in values):
            raise StudyError(f"{min(values)} is less than 1", place=place, mend="give a number of at least 1")
    for batch in batches:
        if batch > most:
            raise StudyError(
                f"{batch} is more than the {most} sequences that the engine runs at once",
                place="batch",
                mend="raise max_sequences",
            )
    for context in contexts:
        if context > model.max_context:
            raise StudyError(
                f"{context} tokens, but {model.name} has a context of {model.max_context}",
                place="context",
                mend=f"use at most {model.max_context}",
            )
    if prompt is not None and prompt >= model.max_context:
        raise StudyError(
            f"{prompt} tokens, but {model.name} has a context of {model.max_context}, the first output token included",
            place="prompt",
            mend=f"use at most {model.max_context - 1}",
        )


def features_of(steps: Iterable[dict[str, float]]) -> Tensor:
    """[steps, len(FEATURES)]; what a step doesn't name is 0."""
    return torch.tensor([[step.get(name, 0) for name in FEATURES] for step in steps], dtype=torch.float64)


def _decoded(
    built: Hardware, batches: Sequence[int], context: int
) -> list[tuple[float, list[float], dict[str, float]]]:
    """(seconds between two tokens of a sequence, seconds of a pass by component, elasticities) of each batch.

    With pipeline stages a batch goes round in as many equal parts.
    """
    if not batches:
        return []
    model, stages = built.cost_model, built.stages
    features = features_of(decode_step(-(-batch // len(stages)), context) for batch in batches)
    components: Tensor = model(features)
    rounds = components.sum(-1) if len(stages) == 1 else round_seconds(model, stages, features)
    return [
        (whole.detach().item(), each.tolist(), elasticities(model, whole))
        for whole, each in zip(rounds, components, strict=True)
    ]


def _measured(
    scenario: Scenario,
    batch: int,
    step_s: float,
    components: list[float],
    by_kind: dict[str, float],
    ttft_s: float | None,
) -> dict[str, Any]:
    """The columns `_MEASURED`."""
    fleet, pass_s = scenario.fleet, sum(components)
    named = dict(zip(COMPONENTS, components, strict=True))
    by_limit = shares(by_kind)
    values = (
        1e3 * step_s,
        batch / step_s,
        batch / step_s / fleet.gpus_per_replica,
        batch / step_s * fleet.replicas,
        None if ttft_s is None else 1e3 * ttft_s,
        *(100.0 * sum(named[name] for name in names) / pass_s for names in PARTS.values()),
        max(by_limit, key=lambda limit: by_limit[limit]),
        *by_kind.values(),
    )
    return dict(zip(_MEASURED, values, strict=True))


def _summary(scenario: Scenario, built: Hardware, contexts: Sequence[int]) -> dict[str, Any]:
    fleet, served, capacity = scenario.fleet, scenario.model, built.capacity
    return {
        "model": served.name,
        "gpu": fleet.gpu,
        "tensor_parallel": fleet.tensor_parallel,
        "pipeline_parallel": fleet.pipeline_parallel,
        "expert_parallel": fleet.expert_parallel,
        "replicas": fleet.replicas,
        "weight_dtype": served.weight_dtype,
        "kv_dtype": served.kv_dtype,
        "weights_gib_per_gpu": capacity.weights_gib,
        "kv_pool_gib_per_gpu": capacity.kv_gib,
        "kv_pool_tokens": capacity.pool_tokens,
        **{f"sequences_of_{each}_that_fit": sequences_that_fit(built, each) for each in dict.fromkeys(contexts)},
        "rests_on": provenance([built]),
        "notes": "; ".join(notes_of([built])) or "none",
    }
