"""One scenario over one trace: from the study's words to the engine's arguments, from its arrays to tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.cost.build import Hardware, build_hardware
from pipeline.replay.engine import Arrivals, EngineConfig, ReplayResult, replay
from pipeline.replay.timeline import Timeline
from pipeline.trace import Trace
from pipeline.workload import TransformedArrivals, transform
from schemas import hardware
from schemas.errors import CapacityError, PreplayError, StudyError
from schemas.outcome import (
    COMPONENTS,
    OUTCOME_SCHEMA,
    TIMELINE_COUNTERS,
    TIMELINE_INTEGRALS,
    TIMELINE_SCHEMA,
)
from schemas.study import NoSpeculation, Scenario

MOST_INTERVALS = 200_000
"""Of a timeline, up to the last arrival."""


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario that was checked against its trace and its hardware, ready to be replayed."""

    name: str
    scenario: Scenario
    hardware: Hardware
    max_model_len: int
    interval_s: float


def resolve(name: str, scenario: Scenario, trace: Trace, interval_s: float) -> ResolvedScenario:
    """Check and build everything that needs no clock.

    Raises StudyError, CatalogError or CapacityError; the scenario's name is the error's place.
    """
    try:
        _check_identity(scenario, trace)
        _check_intervals(scenario, trace, interval_s)
        built = build_hardware(scenario)
        return ResolvedScenario(name, scenario, built, _longest(scenario, built), interval_s)
    except PreplayError as problem:
        place = name if problem.place is None else f"{name}.{problem.place}"
        raise type(problem)(problem.problem, file=problem.file, place=place, mend=problem.mend) from None


def _check_identity(scenario: Scenario, trace: Trace) -> None:
    if not scenario.prefix_cache.enabled:
        return
    if trace.meta.prefix_identity == "unknown" or trace.meta.block_tokens is None:
        raise StudyError(
            "prefix caching is on, but the trace does not tell which prompts share a prefix: its reuse is not known",
            place="prefix_cache.enabled",
            mend="switch it off, or ingest a log that carries prefix identity",
        )
    if trace.meta.block_tokens % scenario.engine.block_tokens:
        raise StudyError(
            f"block_tokens = {scenario.engine.block_tokens} does not divide the trace's blocks of "
            f"{trace.meta.block_tokens} tokens, so what such a block holds is not known",
            place="engine.block_tokens",
            mend="use a divisor",
        )


def _check_intervals(scenario: Scenario, trace: Trace, interval_s: float) -> None:
    """A timeline of millions of intervals serves nobody and fills memory."""
    span_s = float(trace.arrival_us[-1]) / 1e6 / scenario.workload.rate
    if span_s / interval_s > MOST_INTERVALS:
        raise StudyError(
            f"arrivals over {span_s:,.0f} s at timeline_interval_s = {interval_s:g} are over {MOST_INTERVALS:,} intervals",
            mend="widen timeline_interval_s, or raise workload.rate",
        )


def _longest(scenario: Scenario, built: Hardware) -> int:
    """M of docs/replay.md: the longest sequence that the engine takes, tokens."""
    context = hardware.model(scenario.model.name).max_context
    wanted = scenario.engine.max_model_len
    if wanted is not None and wanted > context:
        raise StudyError(f"max_model_len = {wanted}, but {scenario.model.name} has a context of {context} tokens")
    pool = built.capacity.pool_tokens
    if wanted is not None and wanted > pool:
        raise CapacityError(
            f"max_model_len = {wanted}, but the KV pool of a replica holds {pool} tokens",
            mend="lower it, or leave it out to use what fits",
        )
    return min(context, pool, wanted or context)


def arrivals_of(resolved: ResolvedScenario, trace: Trace, seed: int) -> tuple[Arrivals, TransformedArrivals]:
    """The trace as this scenario gets it."""
    transformed = transform(trace.arrival_us, resolved.scenario.workload, seed)
    arrivals = Arrivals(
        arrival_s=transformed.arrival_s,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        block_offsets=trace.block_offsets,
        block_ids=trace.block_ids,
        trace_block_tokens=trace.meta.block_tokens,
    )
    return arrivals, transformed


def engine_config(resolved: ResolvedScenario, seed: int) -> EngineConfig:
    """The engine's arguments."""
    scenario = resolved.scenario
    engine = scenario.engine
    cache = scenario.prefix_cache
    spec = scenario.speculation
    drafter = resolved.hardware.drafter
    return EngineConfig(
        replicas=scenario.fleet.replicas,
        block_tokens=engine.block_tokens,
        pool_blocks=resolved.hardware.capacity.pool_blocks,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=resolved.max_model_len,
        prefix_caching=scenario.prefix_cache.enabled,
        reserve_full_isl=engine.reserve_full_isl,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        hit_alignment_tokens=cache.hit_alignment_tokens or engine.block_tokens,
        visible=cache.visible,
        cache_decode_blocks=cache.cache_decode_blocks,
        unhashed_last=cache.unhashed_freed == "last",
        drop_last_hit_block=drafter is not None and drafter.drops_last_hit_block,
        acceptance=() if isinstance(spec, NoSpeculation) else spec.conditional_acceptance,
        seed=seed,
        interval_s=resolved.interval_s,
        router=scenario.fleet.router,
    )


def run_scenario(resolved: ResolvedScenario, trace: Trace, seed: int) -> tuple[pa.Table, pa.Table]:
    """Replay: (outcomes, timeline), of OUTCOME_SCHEMA and TIMELINE_SCHEMA."""
    arrivals, _ = arrivals_of(resolved, trace, seed)
    result = replay(arrivals, engine_config(resolved, seed), resolved.hardware.lowered)
    return outcomes_table(trace, arrivals, result), timeline_table(resolved, trace, result)


def outcomes_table(trace: Trace, arrivals: Arrivals, result: ReplayResult) -> pa.Table:
    """One row per request of the trace; refused ones have null latencies."""
    requests = result.requests
    refused = result.refused
    n = refused.shape[0]
    ttft = requests.first_token_s - requests.arrival_s
    queue = requests.scheduled_s - requests.arrival_s
    decode = requests.finish_s - requests.first_token_s
    draft, target = requests.decode_draft_s, requests.decode_target_s
    emitted = np.where(refused, 0, requests.emitted)

    def ms(seconds: np.ndarray, null: np.ndarray = refused) -> pa.Array:
        return pa.array(seconds * 1e3, mask=null)

    single = refused | (emitted < 2)
    unknown = refused | ~trace.has_identity  # also with caching off: 0 would read as "nothing to reuse"
    tpot = decode / np.maximum(1, emitted - 1)
    status = pa.DictionaryArray.from_arrays(pa.array(refused.astype(np.int8)), pa.array(["completed", "refused"]))
    columns = {
        "request": pa.array(np.arange(n, dtype=np.int32)),
        "status": status,
        "replica": pa.array(result.replica),
        "arrival_s": pa.array(arrivals.arrival_s),
        "input_tokens": pa.array(trace.input_tokens),
        "output_tokens": pa.array(emitted.astype(np.int32)),
        "clipped": pa.array(~refused & (emitted < trace.output_tokens)),
        "hit_tokens": pa.array(requests.hit_tokens, mask=unknown),
        "recomputed_tokens": pa.array(requests.recomputed_tokens),
        "preemptions": pa.array(requests.preemptions),
        "queue_ms": ms(queue),
        "prefill_ms": ms(ttft - queue - requests.first_output_s),
        "first_output_ms": ms(requests.first_output_s),
        "ttft_ms": ms(ttft),
        "decode_ms": ms(decode),
        "decode_draft_ms": ms(draft),
        "decode_target_ms": ms(target),
        "decode_rest_ms": ms(decode - draft - target),
        "tpot_ms": ms(tpot, single),
        "e2e_ms": ms(requests.finish_s - requests.arrival_s),
        "emitting_steps": pa.array(requests.emitting_steps),
        "spec_steps": pa.array(requests.spec_steps),
        "draft_tokens": pa.array(requests.draft_tokens),
        "accepted_tokens": pa.array(requests.accepted_tokens),
        "trimmed_tokens": pa.array(requests.trimmed_tokens),
    }
    for field in OUTCOME_SCHEMA:
        if field.name not in columns:  # as the trace has it
            columns[field.name] = trace.table.column(field.name)
    return pa.table([columns[name] for name in OUTCOME_SCHEMA.names], schema=OUTCOME_SCHEMA)


def timeline_table(resolved: ResolvedScenario, trace: Trace, result: ReplayResult) -> pa.Table:
    """One row per replica and interval, up to the last interval in which anything happened anywhere."""
    width = resolved.interval_s
    used = max((_intervals_used(each) for each in result.timelines), default=0)
    counters = np.concatenate([_first_rows(each.counters, used) for each in result.timelines])
    integrals = np.concatenate([_first_rows(each.integrals, used) for each in result.timelines]) / width
    components = np.concatenate([_first_rows(each.components, used) for each in result.timelines])
    replicas = len(result.timelines)
    interval = np.tile(np.arange(used, dtype=np.int32), replicas)
    columns: dict[str, np.ndarray] = {
        "replica": np.repeat(np.arange(replicas, dtype=np.int32), used),
        "interval": interval,
        "start_s": interval * width,
        "interval_s": np.full(used * replicas, width),
        **{name: counters[:, column] for column, name in enumerate(TIMELINE_COUNTERS)},
        **{name: integrals[:, column] for column, name in enumerate(TIMELINE_INTEGRALS)},
        **{f"{name}_s": components[:, column] for column, name in enumerate(COMPONENTS)},
    }
    arrays = {name: pa.array(values) for name, values in columns.items()}
    if not trace.has_identity.all():
        arrays["hit_tokens"] = pa.nulls(used * replicas, pa.int64())
    return pa.table([arrays[name] for name in TIMELINE_SCHEMA.names], schema=TIMELINE_SCHEMA)


def _intervals_used(timeline: Timeline) -> int:
    busy = np.flatnonzero(timeline.counters.any(axis=1) | timeline.integrals.any(axis=1))
    return int(busy[-1]) + 1 if busy.size else 0


def _first_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """The first `rows` rows, zeros where a replica was done before."""
    missing = max(0, rows - values.shape[0])
    return np.pad(values[:rows], ((0, missing), (0, 0)))
