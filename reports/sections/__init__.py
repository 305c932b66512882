"""The report's sections, one module each, in the order of the page. A section is `build(warehouse, scenarios) -> Section`."""

from __future__ import annotations

from collections.abc import Callable

from reports.blocks import Section
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse
from reports.sections import (
    assumptions,
    budget,
    decision,
    interaction,
    over_time,
    reproduce,
    reuse,
    scenarios,
    sensitivity,
    validation,
)

SECTIONS: tuple[Callable[[Warehouse, list[ScenarioMetrics]], Section], ...] = (
    decision.build,
    scenarios.build,
    budget.build,
    reuse.build,
    interaction.build,
    over_time.build,
    sensitivity.build,
    validation.build,
    assumptions.build,
    reproduce.build,
)
