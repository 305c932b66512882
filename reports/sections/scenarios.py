"""Section 2: every scenario in one table, the baseline first."""

from __future__ import annotations

from typing import Any

from reports.blocks import Block, Note, Section, Table, table_of
from reports.figures import count, milliseconds, number, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse

_COLUMNS = (
    ("H_tokens", "reuse_ratio", percent),
    ("TTFT p50", "ttft_p50", milliseconds),
    ("TTFT p95", "ttft_p95", milliseconds),
    ("TTFT p99", "ttft_p99", milliseconds),
    ("TPOT p50", "tpot_p50", milliseconds),
    ("TPOT p95", "tpot_p95", milliseconds),
    ("E2E p95", "e2e_p95", milliseconds),
    ("tokens/s/GPU", "output_tokens_per_s_per_gpu", number),
    ("goodput, req/s", "goodput_rps", number),
    ("preemptions", "preemptions", count),
    ("refused", "refused", count),
)


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    del warehouse
    seeds = len(scenarios[0].seeds)
    rows = []
    for each in scenarios:
        values = tuple(write(each.mean(metric)) for _, metric, write in _COLUMNS)
        rows.append((each.name, configuration(each), "✓ met" if each.meets_slo else "✗ missed", *values))
    keys = list(scenarios[0].seeds[0])
    raw: list[tuple[Any, ...]] = [tuple(row[key] for key in keys) for each in scenarios for row in each.seeds]
    table = Table(
        name="scenarios",
        columns=("scenario", "configuration", "service level", *(header for header, _, _ in _COLUMNS)),
        rows=tuple(rows),
        csv_columns=tuple(keys),
        csv_rows=tuple(raw),
        caption=f"Mean over {seeds} seed(s); percentiles are exact, over completed requests. H_tokens: reused prompt "
        "tokens / prompt tokens. tokens/s/GPU: generated tokens. The CSV has one row per scenario and seed, in ms.",
        numeric_from=3,
    )
    settings = table_of(
        "settings",
        [
            ("scenario", "scenario", str),
            ("changes against the baseline", "changes", lambda text: text or "the baseline"),
        ],
        [each.settings for each in scenarios],
        caption="What each scenario changes, setting by setting.",
        numeric_from=9,
        folded=True,
    )
    met = sum(each.meets_slo for each in scenarios)
    blocks: list[Block] = [table, settings]
    if any(each.mean("refused") for each in scenarios):
        blocks.append(
            Note(
                "Refused requests are longer than the engine's longest sequence; they count as outside the service level.",
                "warning",
            )
        )
    if any(each.mean("clipped") for each in scenarios):
        most = max(each.mean("clipped") or 0 for each in scenarios)
        blocks.append(
            Note(
                f"Up to {count(most)} outputs end at the engine's longest sequence, before the log's did: these requests are served "
                "with less work than they really were.",
                "warning",
            )
        )
    return Section(2, "Scenarios", f"{met} of {len(scenarios)} scenarios meet the service level", blocks)


def configuration(mine: ScenarioMetrics) -> str:
    """A scenario's configuration in a few words."""
    settings = mine.settings
    words = [
        f"{settings['replicas']} x {settings['tensor_parallel']} {settings['gpu']}",
        f"{settings['model']} {settings['weight_dtype']}",
        f"caching {'on' if settings['prefix_caching'] else 'off'}",
        "no speculation"
        if not settings["draft_tokens"]
        else f"{settings['speculation']}, k = {settings['draft_tokens']}",
    ]
    if settings["rate"] != 1:
        words.append(f"rate x {number(settings['rate'])}")
    return "; ".join(words)
