"""One scenario over one trace: from the study's words to the engine's arguments, from its arrays to tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cost.build import Hardware, build_hardware
from pipeline.replay.engine import Arrivals, EngineConfig, ReplayResult, replay
from pipeline.replay.speculation import chain
from pipeline.replay.timeline import Timeline
from pipeline.trace import Trace
from pipeline.turns import NamedBlocks, name_replies
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
    names: NamedBlocks | None = None  # null = the trace's own ids, replies unnamed
    priority: NDArray[np.int32] | None = None  # [n] of each request; null = all equal


def resolve(name: str, scenario: Scenario, trace: Trace, interval_s: float) -> ResolvedScenario:
    """Check and build everything that needs no clock.

    Raises StudyError, CatalogError or CapacityError; the scenario's name is the error's place.
    """
    try:
        _check_parallelism(scenario)
        _check_identity(scenario, trace)
        _check_intervals(scenario, trace, interval_s)
        _check_warmup(scenario, trace)
        priority = _priorities(scenario, trace)
        built = build_hardware(scenario)
        cache = scenario.prefix_cache
        infers = cache.enabled and cache.replies == "inferred" and cache.cache_decode_blocks
        names = name_replies(trace, scenario.engine.block_tokens) if infers else None
        return ResolvedScenario(name, scenario, built, _longest(scenario, built), interval_s, names, priority)
    except PreplayError as problem:
        place = name if problem.place is None else f"{name}.{problem.place}"
        raise type(problem)(problem.problem, file=problem.file, place=place, mend=problem.mend) from None


def _check_parallelism(scenario: Scenario) -> None:
    """One step follows the other here; vLLM has a batch in flight for every stage, of sizes that follow from who is in flight."""
    if scenario.fleet.pipeline_parallel > 1:
        raise StudyError(
            f"pipeline_parallel = {scenario.fleet.pipeline_parallel} is not modelled in the replay (docs/parallelism.md)",
            place="fleet.pipeline_parallel",
            mend="use 1, with a larger tensor_parallel; `preplay estimate --pipeline-parallel` bounds its latency and throughput",
        )


def _check_identity(scenario: Scenario, trace: Trace) -> None:
    if not scenario.prefix_cache.enabled:
        return
    if trace.meta.prefix_identity == "unknown" or trace.meta.block_tokens is None:
        raise StudyError(
            "prefix caching is on, but the trace does not tell which prompts share a prefix: its reuse is not known",
            place="prefix_cache.enabled",
            mend="switch it off, or ingest a log that carries prefix identity",
        )
    theirs, ours = trace.meta.block_tokens, scenario.engine.block_tokens
    if theirs % ours and ours % theirs:
        raise StudyError(
            f"block_tokens = {ours} neither divides the trace's blocks of {theirs} tokens nor is a multiple, so what "
            "such a block holds is not known",
            place="engine.block_tokens",
            mend="use a divisor or a multiple",
        )


def _check_warmup(scenario: Scenario, trace: Trace) -> None:
    """A warm-up that leaves nothing to measure would make empty results."""
    warmup_s = scenario.workload.warmup_s
    last_s = float(trace.arrival_us[-1]) / 1e6
    if warmup_s > 0 and warmup_s > last_s:
        raise StudyError(
            f"the trace's last request arrives after {last_s:g} s, so a warm-up of {warmup_s:g} s leaves nothing to measure",
            place="workload.warmup_s",
            mend="shorten it",
        )


def _priorities(scenario: Scenario, trace: Trace) -> NDArray[np.int32] | None:
    """The priority of every request, by its tenant. Raises StudyError for tenants that the trace doesn't have."""
    engine = scenario.engine
    if engine.scheduling != "priority":
        return None
    tenants = trace.table["tenant"].combine_chunks().cast(pa.string()).dictionary_encode()
    names = tenants.dictionary.to_pylist()
    unknown = [name for name in engine.priorities if name not in names]
    if unknown:
        some = ", ".join(f"'{name}'" for name in names[:5]) or "none at all"
        raise StudyError(
            f"the trace has no tenant '{unknown[0]}'", place="engine.priorities", mend=f"its tenants: {some}"
        )
    of_name = np.array([engine.priorities.get(name, engine.default_priority) for name in names], np.int32)
    codes = pc.fill_null(tenants.indices, len(names)).to_numpy()
    priorities: NDArray[np.int32] = np.append(of_name, np.int32(engine.default_priority))[codes]
    return priorities


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
    names = resolved.names
    arrivals = Arrivals(
        arrival_s=transformed.arrival_s,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        block_offsets=trace.block_offsets if names is None else names.block_offsets,
        block_ids=trace.block_ids if names is None else names.block_ids,
        trace_block_tokens=trace.meta.block_tokens,
        named_tokens=None if names is None else names.named_tokens,
        priority=resolved.priority,
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
        policy=cache.policy,
        priority_tokens=cache.priority_tokens or 0,
        ttl_s=cache.ttl_s or None,
        merge_duplicates=cache.duplicates == "merged",
        scheduling=engine.scheduling,
        drop_last_hit_block=drafter is not None and drafter.drops_last_hit_block,
        drafting=None if isinstance(spec, NoSpeculation) else chain(*spec.conditional_acceptance),
        seed=seed,
        interval_s=resolved.interval_s,
        router=scenario.fleet.router,
    )


def run_scenario(resolved: ResolvedScenario, trace: Trace, seed: int) -> tuple[pa.Table, pa.Table]:
    """Replay: (outcomes, timeline), of OUTCOME_SCHEMA and TIMELINE_SCHEMA."""
    arrivals, _ = arrivals_of(resolved, trace, seed)
    result = replay(arrivals, engine_config(resolved, seed), resolved.hardware.lowered)
    return outcomes_table(resolved, trace, arrivals, result), timeline_table(resolved, trace, result)


def outcomes_table(resolved: ResolvedScenario, trace: Trace, arrivals: Arrivals, result: ReplayResult) -> pa.Table:
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
    inferred = np.zeros(n, np.int32) if resolved.names is None else resolved.names.inferred_tokens(requests.hit_tokens)
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
        "warmup": pa.array(trace.arrival_us < resolved.scenario.workload.warmup_s * 1e6),
        "hit_tokens": pa.array(requests.hit_tokens, mask=unknown),
        "hit_tokens_inferred": pa.array(inferred, mask=unknown),
        "rehit_tokens": pa.array(requests.rehit_tokens, mask=unknown),
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
        "itl_p99_ms": ms(requests.itl_p99_s, np.isnan(requests.itl_p99_s)),
        "itl_max_ms": ms(requests.itl_max_s, np.isnan(requests.itl_max_s)),
        "e2e_ms": ms(requests.finish_s - requests.arrival_s),
        "chunk_steps": pa.array(requests.chunk_steps),
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
        arrays["hit_tokens"] = arrays["rehit_tokens"] = pa.nulls(used * replicas, pa.int64())
    return pa.table([arrays[name] for name in TIMELINE_SCHEMA.names], schema=TIMELINE_SCHEMA)


def _intervals_used(timeline: Timeline) -> int:
    busy = np.flatnonzero(timeline.counters.any(axis=1) | timeline.integrals.any(axis=1))
    return int(busy[-1]) + 1 if busy.size else 0


def _first_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """The first `rows` rows, zeros where a replica was done before."""
    missing = max(0, rows - values.shape[0])
    return np.pad(values[:rows], ((0, missing), (0, 0)))
