"""The small tables of a run folder: scenarios, service levels, the account of the ingest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipeline.scenario import ResolvedScenario
from pipeline.trace import Trace
from pipeline.workload import log_tick_us
from schemas import hardware
from schemas.study import BASELINE, NoSpeculation, Scenario, Slo, Study
from schemas.trace import IngestReport

SCENARIO_SCHEMA = pa.schema(
    [
        pa.field("scenario", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # order in the study, baseline 0
        pa.field("is_baseline", pa.bool_(), nullable=False),
        pa.field("changes", pa.string(), nullable=False),  # what differs from the baseline, in words
        pa.field("gpu", pa.string(), nullable=False),
        pa.field("gpu_title", pa.string(), nullable=False),
        pa.field("replicas", pa.int32(), nullable=False),
        pa.field("tensor_parallel", pa.int32(), nullable=False),
        pa.field("gpus", pa.int32(), nullable=False),
        pa.field("router", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("model_title", pa.string(), nullable=False),
        pa.field("weight_dtype", pa.string(), nullable=False),
        pa.field("kv_dtype", pa.string(), nullable=False),
        pa.field("block_tokens", pa.int32(), nullable=False),
        pa.field("max_batched_tokens", pa.int32(), nullable=False),
        pa.field("max_sequences", pa.int32(), nullable=False),
        pa.field("max_model_len", pa.int32(), nullable=False),
        pa.field("prefix_caching", pa.bool_(), nullable=False),
        pa.field("speculation", pa.string(), nullable=False),
        pa.field("draft_tokens", pa.int32(), nullable=False),
        pa.field("conditional_acceptance", pa.list_(pa.float64()), nullable=False),
        pa.field("acceptance_length", pa.float64(), nullable=False),  # expected, far from the output's end
        pa.field("acceptance_source", pa.string()),
        pa.field("settings_cache", pa.string(), nullable=False),  # JSON: the prefix_cache table
        pa.field("settings_speculation", pa.string(), nullable=False),  # JSON: the speculation table
        pa.field("settings_rest", pa.string(), nullable=False),  # JSON: everything else
        pa.field("rate", pa.float64(), nullable=False),
        pa.field("warmup_s", pa.float64(), nullable=False),  # of the trace, before `rate`
        pa.field("turns_with_reply", pa.int64(), nullable=False),  # requests whose reply's blocks were inferred
        pa.field("spread_tick_s", pa.float64()),  # null = arrivals as logged
        pa.field("usable_gib", pa.float64(), nullable=False),  # per GPU, like all memory here
        pa.field("weights_gib", pa.float64(), nullable=False),
        pa.field("draft_weights_gib", pa.float64(), nullable=False),
        pa.field("activations_gib", pa.float64(), nullable=False),
        pa.field("reserve_gib", pa.float64(), nullable=False),
        pa.field("kv_gib", pa.float64(), nullable=False),
        pa.field("kv_bytes_per_token", pa.float64(), nullable=False),
        pa.field("pool_blocks", pa.int64(), nullable=False),  # per replica
        pa.field("pool_tokens", pa.int64(), nullable=False),
    ]
)

SLO_SCHEMA = pa.schema(
    [
        pa.field("percentile", pa.float64(), nullable=False),
        pa.field("ttft_ms", pa.float64()),
        pa.field("tpot_ms", pa.float64()),
        pa.field("e2e_ms", pa.float64()),
    ]
)

INGEST_SCHEMA = pa.schema(
    [
        pa.field("source_format", pa.string(), nullable=False),
        pa.field("sources", pa.string(), nullable=False),
        pa.field("rows_read", pa.int64(), nullable=False),
        pa.field("rows_kept", pa.int64(), nullable=False),
        pa.field("rows_rejected", pa.int64(), nullable=False),
        pa.field("rows_reordered", pa.int64(), nullable=False),
        pa.field("span_s", pa.float64(), nullable=False),
        pa.field("input_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("distinct_arrivals", pa.int64(), nullable=False),
        pa.field("block_tokens", pa.int32()),
        pa.field("distinct_blocks", pa.int64()),
        pa.field("prefix_identity", pa.string(), nullable=False),
        pa.field("start_utc", pa.string()),
    ]
)

REJECTED_REASONS_SCHEMA = pa.schema(
    [
        pa.field("reason", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("first_file", pa.string(), nullable=False),
        pa.field("first_line", pa.int64(), nullable=False),
    ]
)


def scenarios_table(scenarios: Sequence[ResolvedScenario], study: Study, trace: Trace) -> pa.Table:
    """SCENARIO_SCHEMA, in the study's order."""
    tick_us = log_tick_us(trace.arrival_us)
    rows = [_scenario_row(position, resolved, study.baseline, tick_us) for position, resolved in enumerate(scenarios)]
    return pa.Table.from_pylist(rows, schema=SCENARIO_SCHEMA)


def _scenario_row(position: int, resolved: ResolvedScenario, baseline: Scenario, tick_us: int | None) -> dict[str, Any]:
    scenario = resolved.scenario
    capacity = resolved.hardware.capacity
    spec = scenario.speculation
    chain = None if isinstance(spec, NoSpeculation) else spec
    spread = scenario.workload.spread_ticks and tick_us is not None
    return {
        "scenario": resolved.name,
        "position": position,
        "is_baseline": resolved.name == BASELINE,
        "changes": "; ".join(changes_between(baseline.model_dump(), scenario.model_dump())),
        "gpu": scenario.fleet.gpu,
        "gpu_title": hardware.gpu(scenario.fleet.gpu).title,
        "replicas": scenario.fleet.replicas,
        "tensor_parallel": scenario.fleet.tensor_parallel,
        "gpus": scenario.fleet.gpus,
        "router": scenario.fleet.router,
        "model": scenario.model.name,
        "model_title": hardware.model(scenario.model.name).title,
        "weight_dtype": scenario.model.weight_dtype,
        "kv_dtype": scenario.model.kv_dtype,
        "block_tokens": scenario.engine.block_tokens,
        "max_batched_tokens": scenario.engine.max_batched_tokens,
        "max_sequences": scenario.engine.max_sequences,
        "max_model_len": resolved.max_model_len,
        "prefix_caching": scenario.prefix_cache.enabled,
        "speculation": spec.method,
        "draft_tokens": 0 if chain is None else chain.k,
        "conditional_acceptance": [] if chain is None else list(chain.conditional_acceptance),
        "acceptance_length": 1.0 if chain is None else chain.expected_acceptance_length,
        "acceptance_source": None if chain is None else chain.acceptance_source,
        "settings_cache": scenario.prefix_cache.model_dump_json(),
        "settings_speculation": scenario.speculation.model_dump_json(),
        "settings_rest": scenario.model_dump_json(exclude={"prefix_cache", "speculation"}),
        "rate": scenario.workload.rate,
        "warmup_s": scenario.workload.warmup_s,
        "turns_with_reply": 0 if resolved.names is None else resolved.names.turns,
        "spread_tick_s": tick_us * 1e-6 / scenario.workload.rate if spread and tick_us is not None else None,
        "usable_gib": capacity.usable_gib,
        "weights_gib": capacity.weights_gib,
        "draft_weights_gib": capacity.draft_weights_gib,
        "activations_gib": capacity.activations_gib,
        "reserve_gib": capacity.reserve_gib,
        "kv_gib": capacity.kv_gib,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "pool_blocks": capacity.pool_blocks,
        "pool_tokens": capacity.pool_tokens,
    }


def changes_between(base: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """The settings of `other` that differ from `base`, as ``path = value``."""
    changes = []
    for key, value in other.items():
        path = f"{prefix}{key}"
        old = base.get(key)
        if isinstance(value, dict):
            changes += changes_between(old if isinstance(old, dict) else {}, value, f"{path}.")
        elif value != old:
            changes.append(f"{path} = {json.dumps(value)}")
    return changes


def slo_table(slo: Slo) -> pa.Table:
    """SLO_SCHEMA, one row; null = no limit."""
    return pa.Table.from_pylist([slo.model_dump()], schema=SLO_SCHEMA)


def ingest_tables(report: IngestReport | None) -> dict[str, pa.Table]:
    """INGEST_SCHEMA (one row, none where the trace came without its account) and REJECTED_REASONS_SCHEMA."""
    if report is None:
        return {"ingest": INGEST_SCHEMA.empty_table(), "rejected_reasons": REJECTED_REASONS_SCHEMA.empty_table()}
    row = report.model_dump()
    row["sources"] = ", ".join(source.name for source in report.sources)
    return {
        "ingest": pa.Table.from_pylist([{name: row[name] for name in INGEST_SCHEMA.names}], schema=INGEST_SCHEMA),
        "rejected_reasons": pa.Table.from_pylist(
            [reason.model_dump() for reason in report.rejected_by_reason], schema=REJECTED_REASONS_SCHEMA
        ),
    }
