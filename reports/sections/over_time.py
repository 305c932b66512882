"""Section 8: demand, queue, KV memory and reuse by interval, the peak marked."""

from __future__ import annotations

from reports.blocks import Block, Chart, Section, table_of
from reports.charts import MOST_SERIES, time_chart
from reports.figures import count, number, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    names = [each.name for each in scenarios][:MOST_SERIES]
    rows = [{**row, "series": row["scenario"]} for row in warehouse.rows("over_time")]
    peaks = warehouse.rows("peak")
    if not rows or not peaks:
        return Section(8, "Over time", "Nothing was replayed", [])
    peak = peaks[0]
    finding = f"The baseline is fullest at minute {number(peak['minute'])}: {number(peak['requests_in_system'])} requests in the fleet"
    blocks: list[Block] = []
    lines = [
        (
            "arrivals_per_s",
            "arrivals, req/s",
            names[:1],
            "Demand, as the fleet got it (the same in every scenario of equal rate).",
        ),
        ("waiting", "waiting requests, fleet", names, "The queue: requests that wait for their first token budget."),
        (
            "running",
            "running requests, fleet",
            names,
            "Requests being served. Faster decoding empties the fleet: it lowers the batch.",
        ),
        (
            "kv_used_share",
            "KV blocks held, share",
            names,
            "KV memory held by running requests, share of the fleet's blocks.",
        ),
        (
            "kv_cached_share",
            "KV blocks cached, share",
            names,
            "Blocks that nobody holds and that can still be hit (0 with caching off).",
        ),
    ]
    caching = [name for each in scenarios if each.settings["prefix_caching"] and (name := each.name) in names]
    if caching:
        lines.append(
            (
                "hit_share_of_prefill",
                "prompt tokens hit, share",
                caching,
                "Reuse by interval: hit tokens of hit and prefilled ones, tokens prefilled again after a preemption included.",
            )
        )
    for value, title, shown, caption in lines:
        marked = peak["minute"] if value in ("arrivals_per_s", "waiting", "running") else None
        slim = [
            {"series": row["series"], "minute": round(row["minute"], 3), value: row[value]}
            for row in rows
            if row["series"] in shown
        ]
        for row in slim:
            row[value] = None if row[value] is None else float(f"{row[value]:.4g}")
        blocks.append(
            Chart(
                time_chart(slim, shown, names, value, title, f"{title} over time. {finding}.", peak=marked),
                f"Read: {caption} First seed.",
            )
        )
    blocks.append(
        table_of(
            "over_time",
            [
                ("scenario", "scenario", str),
                ("minute", "minute", number),
                ("arrivals, req/s", "arrivals_per_s", number),
                ("waiting", "waiting", number),
                ("running", "running", number),
                ("KV held", "kv_used_share", percent),
                ("KV cached", "kv_cached_share", percent),
                ("preemptions", "preemptions", count),
            ],
            warehouse.rows("over_time"),
            caption="Data of the charts above, first seed.",
            folded=True,
        )
    )
    return Section(8, "Over time", finding, blocks)
