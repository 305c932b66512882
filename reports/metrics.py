"""Scenario metrics over seeds, as every section reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reports.queries import Row, Warehouse


@dataclass(frozen=True)
class ScenarioMetrics:
    """One scenario: its settings row, and its metrics row per seed (scenario_seed_metrics.sql)."""

    name: str
    settings: Row
    seeds: tuple[Row, ...]

    def values(self, metric: str) -> list[Any]:
        """The metric per seed."""
        return [row[metric] for row in self.seeds]

    def mean(self, metric: str) -> float | None:
        """Mean over seeds; None where it is unknown for any."""
        values = self.values(metric)
        if any(value is None for value in values):
            return None
        return float(sum(values)) / len(values)

    @property
    def meets_slo(self) -> bool:
        """On every seed."""
        return all(self.values("meets_slo"))

    def apart_from(self, other: ScenarioMetrics, metric: str) -> bool:
        """Whether the two differ in the same direction on every seed (same seeds, paired)."""
        pairs = [(mine, base) for mine, base in zip(self.values(metric), other.values(metric), strict=True)]
        if any(mine is None or base is None for mine, base in pairs):
            return False
        return all(mine < base for mine, base in pairs) or all(mine > base for mine, base in pairs)


def scenario_metrics(warehouse: Warehouse) -> list[ScenarioMetrics]:
    """All scenarios, the baseline first."""
    by_name: dict[str, list[Row]] = {}
    for row in warehouse.rows("scenario_seed_metrics"):
        by_name.setdefault(row["scenario"], []).append(row)
    return [
        ScenarioMetrics(row["scenario"], row, tuple(by_name[row["scenario"]]))
        for row in warehouse.rows("scenario_settings")
    ]
