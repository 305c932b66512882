"""Section 3: which part of the latency budget each option touched, and which it did not."""

from __future__ import annotations

from reports.blocks import Block, Chart, Note, Section, table_of
from reports.charts import budget_chart
from reports.figures import change, milliseconds, number, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

_LABELS = {
    "queue": "queue",
    "prefill": "prefill",
    "first_output": "first output",
    "decode_target": "decode: target",
    "decode_draft": "decode: draft",
    "decode_rest": "decode: rest",
}


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    rows = [{**row, "part": _LABELS[row["part"]]} for row in warehouse.rows("latency_budget")]
    names = [each.name for each in scenarios]
    totals = {name: sum(row["mean_ms"] for row in rows if row["scenario"] == name) for name in names}
    if not totals[names[0]]:
        return Section(3, "Latency budget", "The baseline completed no request: no latency to divide", [])
    empty = [name for name in names if not totals[name]]
    names = [name for name in names if totals[name]]
    scenarios = [each for each in scenarios if each.name in names]
    shares = sorted(
        ((row["mean_ms"] / totals[names[0]], row["part"]) for row in rows if row["scenario"] == names[0]), reverse=True
    )
    finding = f"{percent(shares[0][0], 2)} of the baseline's mean latency is {shares[0][1]}, {percent(shares[1][0], 2)} {shares[1][1]}"
    by_key = {(row["scenario"], row["part"]): row["mean_ms"] for row in rows}
    blocks: list[Block] = [
        Chart(
            budget_chart(rows, names, f"Stacked bars of mean request latency by part. {finding}."),
            "Read: one bar per scenario, parts in the order in which they happen; the whole bar is the mean E2E latency. "
            "decode: target is the forward pass of the served model (with speculation: verification), other requests' "
            "prefill chunks in the same steps included, so caching shortens other requests' decode a little, by way of shorter "
            "chunks; it touches no decode step of its own.",
            table_of(
                "latency_budget",
                [("scenario", "scenario", str), ("part", "part", str), ("mean", "mean_ms", milliseconds)],
                rows,
                numeric_from=2,
                folded=True,
            ),
        ),
        *(Note(_credit(each, names[0], by_key)) for each in scenarios[1:]),
        *(Note(f"“{name}” completed no request: it has no latency to divide.", "warning") for name in empty),
    ]
    components = warehouse.rows("gpu_time")
    blocks.append(
        table_of(
            "gpu_time",
            [
                ("scenario", "scenario", str),
                ("component of a step", "component", str),
                ("replica time, s", "gpu_s", number),
                ("share", "share", percent),
            ],
            components,
            caption="Where the replicas' busy time went, by component of the cost model (mean over seeds).",
            numeric_from=2,
            folded=True,
        )
    )
    return Section(3, "Latency budget", finding, blocks)


def _credit(mine: ScenarioMetrics, baseline: str, by_key: dict[tuple[str, str], float]) -> str:
    """Who is credited with what: caching with queue and prefill, speculation with the decode loop, each by its part."""

    def delta(*parts: str) -> str:
        return change(sum(by_key[mine.name, p] for p in parts), sum(by_key[baseline, p] for p in parts))

    decode = ("decode: target", "decode: draft", "decode: rest")
    return (
        f"“{mine.name}”: queue {delta('queue')}, prefill {delta('prefill')}, first output {delta('first output')}, "
        f"decode loop {delta(*decode)}."
        + (
            " Drafting delays the first output: that is speculation's cost in TTFT."
            if mine.settings["draft_tokens"]
            else ""
        )
    )
