"""Section 12: assumptions, data quality, definitions, limits."""

from __future__ import annotations

import json
from typing import Any

from reports.blocks import Block, Note, Section, Table, table_of
from reports.figures import count, number
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

DEFINITIONS = (
    (
        "H_tokens, reuse ratio",
        "reused prompt tokens / prompt tokens, sum over sum. Full blocks only; a prompt's last token is always computed",
    ),
    ("TTFT", "time to first token: queue + prefill + first output (network not modelled), ms"),
    ("TPOT", "(E2E − TTFT) / (output tokens − 1), ms; not defined for a single token"),
    ("E2E", "from arrival to the last token, ms"),
    (
        "goodput",
        "completed requests within every limit of the service level, per second from the first arrival to the last finish",
    ),
    (
        "service level met",
        "at least the given percentage of all requests (refused ones included) is within each limit, on every seed",
    ),
    ("queue", "from arrival to the first step that computes for the request"),
    ("first output", "sampling and drafting parts of the step that emits the first token"),
    ("acceptance length", "committed tokens per verification step, the target's own token included"),
    ("preemption", "a running request gives its KV blocks up and is computed again later"),
    ("interval", "smallest to largest value over the study's seeds; not a confidence interval"),
)

LIMITS = (
    "Network, tokenisation and detokenisation are not modelled.",
    "Reuse inside a trace block of different ids is not known from the trace and counts as none: a lower bound.",
    "Output lengths are the log's: speculation and caching change when tokens come, never which.",
    "Arrivals are open loop: a user who gets an answer sooner does not ask again sooner.",
    "This version has no sections on speculation by load (5), capacity (7) and who benefits (9).",
)


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    header = warehouse.row("header") or {}
    ingest = warehouse.row("data_quality")
    blocks: list[Block] = []
    if header.get("notes"):
        blocks.append(Note(" ".join(str(header["notes"]).split())))
    spread = next((each.settings["spread_tick_s"] for each in scenarios if each.settings["spread_tick_s"]), None)
    if spread is not None:
        blocks.append(
            Note(
                f"Arrivals that share a timestamp were spread over the log's tick of {number(spread)} s, seeded, in the log's order."
            )
        )
    else:
        blocks.append(Note("Arrivals are as logged; nothing was spread."))
    blocks.append(Note(f"Cost model: {header.get('cost_model')}."))
    blocks += [Note(f"{note}.") for note in json.loads(header.get("cost_model_notes") or "[]")]
    blocks += [
        Note(f"“{each.name}”: acceptance {number(each.settings['acceptance_length'])} tokens per step expected; source: "
             f"{each.settings['acceptance_source']}.")
        for each in scenarios
        if each.settings["draft_tokens"]
    ]  # fmt: skip
    blocks += [Note(text, level) for text, level in _replayed(scenarios)]
    blocks.append(_memory(scenarios))
    if ingest is None:
        finding = "Data quality: not known, the trace came without the account of its ingest"
    else:
        finding = (
            f"Data: {count(ingest['rows_read'])} rows read = {count(ingest['rows_kept'])} kept + "
            f"{count(ingest['rows_rejected'])} rejected"
        )
        blocks.append(_quality(ingest))
        rejected = warehouse.rows("rejected_reasons")
        if rejected:
            blocks.append(
                table_of(
                    "rejected",
                    [
                        ("reason", "reason", str),
                        ("rows", "rows", count),
                        ("first in", "first_file", str),
                        ("line", "first_line", count),
                    ],
                    rejected,
                    caption="Rejected rows by reason; each one is in the trace folder's rejected.parquet.",
                )
            )
    rows = tuple((term, text) for term, text in DEFINITIONS)
    blocks.append(
        Table(
            "definitions",
            ("metric", "definition"),
            rows,
            ("metric", "definition"),
            rows,
            numeric_from=9,
            caption="Definitions",
        )
    )
    blocks += [Note(text) for text in LIMITS]
    return Section(12, "Assumptions and data", finding, blocks)


def _replayed(scenarios: list[ScenarioMetrics]) -> list[tuple[str, str]]:
    """What the replay did with the trace that a reader must know, and how strongly to say it."""
    notes: list[tuple[str, str]] = []
    warm = {each.settings["warmup_s"] for each in scenarios}
    if warm != {0.0}:
        longest = max(warm)
        notes.append(
            (
                f"Requests of the trace's first {number(longest)} s were replayed but not measured (warm-up); the charts over time "
                "and the totals of evictions and GPU time show them.",
                "plain",
            )
        )
    caching = [each for each in scenarios if each.settings["prefix_caching"]]
    inferring = [each for each in caching if each.settings["turns_with_reply"]]
    if inferring:
        names = ", ".join(f"“{each.name}”" for each in inferring)
        turns = count(inferring[0].settings["turns_with_reply"])
        notes.append(
            (
                f"In {names} the next turn of a session can hit the reply before it. Which blocks a reply filled is inferred from the "
                f"next turn's prompt, for {turns} requests; the log does not say it.",
                "warning",
            )
        )
    elif caching:
        notes.append(
            (
                "Generated tokens are never hit by later turns here: the trace names no sessions, or none whose next turn repeats the "
                "reply. An engine would hit them: reuse is a lower bound.",
                "plain",
            )
        )
    return notes


def _memory(scenarios: list[ScenarioMetrics]) -> Table:
    columns: list[tuple[str, str, Any]] = [
        ("scenario", "scenario", str),
        ("usable", "usable_gib", number),
        ("weights", "weights_gib", number),
        ("draft weights", "draft_weights_gib", number),
        ("activations", "activations_gib", number),
        ("reserve", "reserve_gib", number),
        ("KV pool", "kv_gib", number),
        ("tokens in a replica's pool", "pool_tokens", count),
    ]
    keys = [key for _, key, _ in columns]
    rows = [{key: each.settings[key] for key in keys} for each in scenarios]
    return table_of("memory", columns, rows, caption="Memory of one GPU, GiB: the KV pool is what is left.")


def _quality(ingest: dict[str, Any]) -> Table:
    identity = {"known": "known", "inferred": "inferred", "unknown": "not known from this log"}[
        ingest["prefix_identity"]
    ]
    facts = [
        ("format", ingest["source_format"]),
        ("files", ingest["sources"]),
        ("rows read", count(ingest["rows_read"])),
        ("rows kept", count(ingest["rows_kept"])),
        ("rows rejected", count(ingest["rows_rejected"])),
        ("rows sorted into order", count(ingest["rows_reordered"])),
        ("span", f"{number(ingest['span_s'])} s"),
        ("prompt tokens", count(ingest["input_tokens"])),
        ("generated tokens", count(ingest["output_tokens"])),
        ("distinct timestamps", count(ingest["distinct_arrivals"])),
        ("prefix identity", identity),
        ("tokens per trace block", count(ingest["block_tokens"])),
        ("distinct blocks", count(ingest["distinct_blocks"])),
    ]
    rows = tuple((name, str(value)) for name, value in facts)
    return Table(
        "data_quality", ("fact", "value"), rows, tuple(ingest), (tuple(ingest.values()),), caption="What was ingested"
    )
