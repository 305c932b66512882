"""Section 11: predicted against observed, where the log has latencies; otherwise it says that nothing was validated."""

from __future__ import annotations

from reports.blocks import Note, Section, table_of
from reports.figures import count, milliseconds, percent
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    del scenarios
    rows = warehouse.rows("validation")
    if not rows:
        return Section(
            11,
            "Validation",
            "Not validated: the log holds no observed latencies",
            [
                Note(
                    "Nothing on this page was compared with a real run of this fleet. The cost model runs on default efficiencies: "
                    "trust the direction and the order of magnitude of a change, not the third digit of a latency.",
                    "warning",
                )
            ],
        )
    errors = ", ".join(f"{row['latency']} {percent(row['median_absolute_error'], 2)}" for row in rows)
    table = table_of(
        "validation",
        [
            ("latency", "latency", str),
            ("requests", "requests", count),
            ("observed mean", "observed_mean_ms", milliseconds),
            ("predicted mean", "predicted_mean_ms", milliseconds),
            ("observed p50", "observed_p50_ms", milliseconds),
            ("predicted p50", "predicted_p50_ms", milliseconds),
            ("observed p95", "observed_p95_ms", milliseconds),
            ("predicted p95", "predicted_p95_ms", milliseconds),
            ("median absolute error", "median_absolute_error", percent),
        ],
        rows,
        caption="The baseline against the log, over requests that have both. It says something only if the baseline is configured as "
        "the fleet that wrote the log.",
    )
    return Section(11, "Validation", f"Median absolute error against the log: {errors}", [table])
