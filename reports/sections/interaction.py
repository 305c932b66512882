"""Section 6: the 2 x 2 of prefix caching and speculation, with the interaction term: gains are not additive."""

from __future__ import annotations

from typing import Any

from reports.blocks import Chart, Note, Section, table_of
from reports.charts import interaction_chart
from reports.figures import milliseconds, number, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

_CHARTED = ("TTFT p95", "TPOT p95", "E2E p95")
_VALUES = ("neither_ms", "caching_ms", "speculation_ms", "both_ms", "interaction_ms")


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    del scenarios
    per_seed = warehouse.rows("interaction")
    if not per_seed:
        return Section(
            6,
            "Interaction",
            "Interaction of caching and speculation: not in this study",
            [
                Note(
                    "It takes four scenarios that differ in nothing else: neither, each alone, both. Add the missing what-ifs and run again."
                )
            ],
        )
    rows = _means(per_seed)
    focus = next(row for row in rows if row["metric"] == "E2E p95")
    saved_alone = 2 * focus["neither_ms"] - focus["caching_ms"] - focus["speculation_ms"]
    saved_both = focus["neither_ms"] - focus["both_ms"]
    if focus["sign"] == "unclear":
        finding = "p95 E2E: whether the savings add up can't be told from these seeds"
    else:
        less = "less" if focus["interaction_ms"] > 0 else "more"
        finding = (
            f"Gains do not add up: together they save {milliseconds(saved_both)} of p95 E2E, "
            f"{milliseconds(abs(saved_both - saved_alone))} {less} than the sum of each alone"
        )
    bars = [
        {"metric": row["metric"], "option": option, "order": order, "saving_ms": saving}
        for row in rows
        if row["metric"] in _CHARTED
        for order, (option, saving) in enumerate(
            (
                ("caching alone", row["neither_ms"] - row["caching_ms"]),
                ("speculation alone", row["neither_ms"] - row["speculation_ms"]),
                ("sum of the two", 2 * row["neither_ms"] - row["caching_ms"] - row["speculation_ms"]),
                ("both, as replayed", row["neither_ms"] - row["both_ms"]),
            )
        )
    ]
    chart = Chart(
        interaction_chart(bars, f"Savings of caching, speculation, their sum and both together. {finding}."),
        "Read: the last bar of each group is what both together really save; the grey one is what adding up would promise. Each "
        "group has its own scale.",
        table_of(
            "interaction",
            [
                ("metric", "metric", str),
                ("neither", "neither_ms", milliseconds),
                ("caching", "caching_ms", milliseconds),
                ("speculation", "speculation_ms", milliseconds),
                ("both", "both_ms", milliseconds),
                ("interaction", "interaction_ms", milliseconds),
                ("over seeds", "interval", str),
                ("share of the sum", "share", lambda share: percent(share, 2)),
            ],
            rows,
            caption="interaction = (both − neither) − [(caching − neither) + (speculation − neither)]; above 0: together they "
            "save less than the sum. Mean over seeds.",
        ),
    )
    return Section(6, "Interaction", finding, [chart])


def _means(per_seed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per metric: means over seeds, and the interaction's range."""
    rows = []
    for metric in dict.fromkeys(row["metric"] for row in per_seed):
        mine = [row for row in per_seed if row["metric"] == metric]
        if any(row[key] is None for row in mine for key in _VALUES):
            continue
        row: dict[str, Any] = {"metric": metric}
        row |= {key: sum(each[key] for each in mine) / len(mine) for key in _VALUES}
        low, high = min(r["interaction_ms"] for r in mine), max(r["interaction_ms"] for r in mine)
        row["interval"] = f"{number(low)} to {number(high)} ms" if len(mine) > 1 else "1 seed: no interval"
        row["sign"] = "unclear" if low <= 0 <= high else "clear"
        total = 2 * row["neither_ms"] - row["caching_ms"] - row["speculation_ms"]
        row["share"] = row["interaction_ms"] / total if total else None
        rows.append(row)
    return rows
