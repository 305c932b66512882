"""Section 4: how much prompt work is reusable, at which cache size, and how much of it each scenario got."""

from __future__ import annotations

from typing import Any

from reports.blocks import Block, Chart, Note, Section, table_of
from reports.charts import curve_chart, hit_length_chart
from reports.figures import change, count, milliseconds, number, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

NOT_KNOWN = "not known from this log"


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    curve = warehouse.rows("reuse_curve")
    if not curve:
        return Section(
            4,
            "Reuse",
            f"Reusable prompt work: {NOT_KNOWN}",
            [
                Note(
                    "The trace does not say which prompts share a prefix (prefix identity: unknown). Reuse ratio, miss-ratio curve, "
                    f"hit lengths: {NOT_KNOWN}. That is not zero reuse. Export block hashes, token ids or session ids to know.",
                    "warning",
                )
            ],
        )
    ladder = warehouse.rows("reuse_ladder")
    ceiling = ladder[0]["reuse_ratio"]
    got = [row for row in ladder if row["scenario"] is not None and row["reuse_ratio"] is not None]
    finding = f"{percent(ceiling)} of prompt tokens are reusable at best"
    if got:
        best = max(got, key=lambda row: row["reuse_ratio"])
        finding += f"; {best['scenario']} reused {percent(best['reuse_ratio'])}"
    blocks: list[Block] = [*_ladder_notes(ladder), _curve(warehouse, curve, finding)]
    if lengths := _hit_lengths(warehouse, [each.name for each in scenarios]):
        blocks.append(lengths)
    cold_warm = warehouse.rows("cold_warm")
    if cold_warm:
        for row in cold_warm:
            row["change"] = change(row["ttft_p50_ms"], row["baseline_ttft_p50_ms"])
        blocks.append(
            table_of(
                "cold_warm",
                [
                    ("scenario", "scenario", str),
                    ("share of the prompt hit", "prompt_hit", str),
                    ("requests, all seeds", "requests", count),
                    ("TTFT p50", "ttft_p50_ms", milliseconds),
                    ("the same requests in the baseline", "baseline_ttft_p50_ms", milliseconds),
                    ("change", "change", str),
                    ("mean paired change", "mean_change_ms", milliseconds),
                ],
                cold_warm,
                caption="Cold against warm: a hit ratio is not a TTFT ratio. Paired by request and seed.",
                numeric_from=2,
            )
        )
    blocks.append(
        table_of(
            "evictions",
            [
                ("scenario", "scenario", str),
                ("cached blocks evicted for prompts", "evicted_prefill_blocks", count),
                ("for decoding", "evicted_decode_blocks", count),
                ("expired", "expired_blocks", count),
                ("tokens evicted or expired", "evicted_tokens", count),
                ("preemptions", "preemptions", count),
                ("tokens computed by prefill", "prefill_tokens", count),
                ("of these, again after a preemption", "recomputed_tokens", count),
            ],
            warehouse.rows("evictions"),
            caption="Cached blocks lost per seed, by cause: room for a prompt's blocks, room for a decoding request's, or the end of "
            "their time to live (prefix_cache.ttl_s).",
        )
    )
    inferred = [row for row in got if row["inferred_ratio"]]
    blocks += [
        Note(
            f"{row['scenario']}: {percent(row['inferred_ratio'])} of prompt tokens were hit on replies of the turn before; which "
            "blocks these are is inferred. The ceiling counts prompts only, so such hits come on top of it.",
            "warning",
        )
        for row in inferred
    ]
    blocks.append(Note("Not in this version: reuse by tier, and the price of isolation per tenant or user."))
    return Section(4, "Reuse", finding, blocks)


def _ladder_notes(ladder: list[dict[str, Any]]) -> list[Block]:
    """What is lost on the way from the ceiling to the replay."""
    table = table_of(
        "reuse_ladder",
        [("from what is possible to what was reused", "rung", str), ("reuse ratio, tokens", "reuse_ratio", percent)],
        ladder,
        caption="What lies between the ceiling and the fleet's memory is capacity; what lies between that and the replay is "
        "routing (each replica has a cache of its own), timing, and blocks that speculation drops from every hit.",
    )
    return [table]


def _curve(warehouse: Warehouse, curve: list[dict[str, Any]], finding: str) -> Chart:
    marks = warehouse.rows("reuse_marks")
    knee = warehouse.row("reuse_knee")
    if knee is not None:
        marks = [*marks, {"mark": "knee", "cache_gib": knee["cache_gib"], "reuse_ratio": knee["reuse_ratio"]}]
    words = "; ".join(
        f"{row['mark']}: {number(row['cache_gib'])} GiB, {percent(row['reuse_ratio'])} reused" for row in marks
    )
    return Chart(
        curve_chart(curve, marks, f"Miss-ratio curve over cache size. {finding}. {words}."),
        f"Read: the share of prompt tokens that must be computed with one LRU cache of that size for the whole fleet, in zero "
        f"time; the lower, the better. Exact at every size, from one pass over the trace. {words}.",
        table_of(
            "reuse_curve",
            [
                ("cache, GiB", "cache_gib", number),
                ("trace blocks", "capacity_blocks", count),
                ("reused", "reuse_ratio", percent),
                ("computed", "miss_ratio", percent),
            ],
            curve,
            numeric_from=0,
            folded=True,
        ),
    )


def _hit_lengths(warehouse: Warehouse, scenarios: list[str]) -> Chart | None:
    rows = warehouse.rows("hit_lengths")
    if not rows:
        return None
    for row in rows:
        low, below = row["from_tokens"], row["below_tokens"]
        row["bin"] = "none" if low == 0 else f"{low:,} to {below - 1:,}"
        row["bin_order"] = low
    names = list(dict.fromkeys(row["series"] for row in rows))
    most = max((row for row in rows if row["series"] == names[0]), key=lambda row: row["share"])
    finding = f"With an unbounded cache {percent(most['share'], 2)} of requests hit {most['bin']} tokens"
    return Chart(
        hit_length_chart(rows, scenarios, f"Distribution of hit length. {finding}."),
        f"Read: how long the reused prefix is, not only whether there is one. {finding}.",
        table_of(
            "hit_lengths",
            [
                ("cache", "series", str),
                ("hit length, tokens", "bin", str),
                ("requests", "requests", count),
                ("share", "share", percent),
            ],
            rows,
            numeric_from=2,
            folded=True,
        ),
    )
