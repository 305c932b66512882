"""Section 10: what each latency percentile is bound by, as elasticities to the cost model's constants."""

from __future__ import annotations

from typing import Any

from reports.blocks import Note, Section, table_of
from reports.figures import milliseconds, number
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

_KINDS = {
    "memory_bandwidth": "memory bandwidth",
    "flops": "FLOP/s",
    "link_bandwidth": "interconnect bandwidth",
    "link_latency": "interconnect latency",
    "thread_blocks": "thread blocks",
    "launches": "kernel launches",
    "host": "host",
}
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    del scenarios
    rows = [_named(row) for row in warehouse.rows("sensitivity")]
    if not rows:
        return Section(
            10,
            "Sensitivity",
            "Sensitivity: not computed in this run",
            [Note('Set sensitivity = "baseline" or "all" in the study and run again.')],
        )
    parts = []
    for metric in ("TTFT p95", "TPOT p95"):
        row = next((each for each in rows if each["metric"] == metric), None)
        if row is not None:
            kind = max(_KINDS, key=lambda each, row=row: abs(row[each]))  # type: ignore[misc]
            parts.append(f"{metric} most by {_KINDS[kind]} ({number(abs(row[kind]), 2)} % per 1 %)")
    finding = f"Of {rows[0]['scenario']}, what moves latency: " + (", ".join(parts) or "nothing was measured")
    table = table_of(
        "sensitivity",
        [
            ("scenario", "scenario", str),
            ("latency", "metric", str),
            ("value", "value_ms", milliseconds),
            *[(name, kind, _signed) for kind, name in _KINDS.items()],
            ("everything 1 % slower", "amplification", _signed),
        ],
        rows,
        caption="Change in % for 1 % more of each: minus = a faster part shortens it. The last column adds all up: over 1 % where requests wait "
        "behind others, because their waiting grows with every step before their own.",
        numeric_from=2,
    )
    note = Note(
        "Slopes on the schedule of the first seed as it was replayed, by gradient through the cost model: right for small changes. A large "
        "change reorders the queue; replay it as a scenario."
    )
    return Section(10, "Sensitivity", finding, [table, note])


def _named(row: dict[str, Any]) -> dict[str, Any]:
    latency, percentile = row["metric"].split("_")
    return row | {"metric": f"{_NAMES[latency]} {percentile}"}


def _signed(value: float) -> str:
    return f"{value:+.2f}"
