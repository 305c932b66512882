"""Section 1: the decision in one sentence per what-if, and the headline numbers with change and interval."""

from __future__ import annotations

from reports.blocks import Block, Note, Section, Tile, Tiles
from reports.figures import change, count, milliseconds, number, percent, spread
from reports.metrics import ScenarioMetrics
from reports.queries import Row, Warehouse

_METRICS = (("ttft_p95", "p95 TTFT"), ("tpot_p95", "p95 TPOT"), ("e2e_p95", "p95 E2E"))

NOTICEABLE = 0.01
"""A change of under 1 % on every headline latency is called no difference worth acting on, whatever its sign."""


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    baseline, whatifs = scenarios[0], scenarios[1:]
    slo = warehouse.row("service_levels")
    sentences = [verdict(each, baseline) for each in whatifs]
    blocks: list[Block] = [Note(text) for text in sentences]
    blocks.append(Note(f"Service level: {slo_text(slo)}."))
    blocks.append(
        Note(
            "GPUs needed at the service level: not computed, this version does not size fleets. Give what-ifs other values of fleet.replicas to see."
        )
    )
    if not baseline.meets_slo:
        blocks.append(
            Note("The baseline itself misses the service level: changes against it flatter every what-if.", "warning")
        )
    if len({each.mean("refused") for each in scenarios}) > 1:
        blocks.append(
            Note(
                "The scenarios refuse different numbers of requests (section 2): their percentiles are over different requests, "
                "so changes between them are not like for like.",
                "warning",
            )
        )
    blocks += [_tiles(each, baseline) for each in scenarios]
    better = [each for each in whatifs if same_load(each, baseline) and _judgement(each, baseline) == "on"]
    finding = _finding(better, whatifs, baseline)
    return Section(1, "Decision", finding, blocks)


def _finding(better: list[ScenarioMetrics], whatifs: list[ScenarioMetrics], baseline: ScenarioMetrics) -> str:
    if not whatifs:
        return "Baseline only: the study compares it with nothing"
    if not better:
        return "None of the what-ifs is better than the baseline without losing something"
    best = min(better, key=lambda each: each.mean("e2e_mean") or float("inf"))
    return f"Best of those that lose nothing: {best.name}, mean E2E {change(best.mean('e2e_mean'), baseline.mean('e2e_mean'))}"


def _judgement(mine: ScenarioMetrics, base: ScenarioMetrics) -> str:
    """on, off, trade, none or misses: see `verdict`."""
    if not mine.meets_slo:
        return "misses"
    gains = losses = 0
    for metric, _ in _METRICS:
        value, reference = mine.mean(metric), base.mean(metric)
        if value is None or reference is None or not mine.apart_from(base, metric):
            continue
        if abs(value - reference) < NOTICEABLE * reference:
            continue
        gains += value < reference
        losses += value > reference
    if gains and losses:
        return "trade"
    return "on" if gains else "off" if losses else "none"


def verdict(mine: ScenarioMetrics, base: ScenarioMetrics) -> str:
    """One sentence: what to do about a what-if, and why. A result that misses the service level is not offered as one."""
    judgement = _judgement(mine, base)
    name = f"“{mine.name}”"
    if judgement == "misses":
        return f"{name}: not offered as a result, it misses the service level ({percent(mine.mean('within_slo_share'))} of requests within it)."
    changes = ", ".join(f"{label} {change(mine.mean(metric), base.mean(metric))}" for metric, label in _METRICS)
    if not same_load(mine, base):
        return (
            f"{name}, another load (rate x {number(mine.settings['rate'])}), still meets the service level: {changes}."
        )
    switch = mine.settings["settings_rest"] == base.settings["settings_rest"]  # only caching or speculation differ
    head = {
        "on": f"Turn {name} on at this load" if switch else f"Choose {name} at this load",
        "off": f"Leave {name} off at this load" if switch else f"Don't choose {name} at this load",
        "trade": f"{name} is a trade at this load: something gets better, something worse",
        "none": f"{name}: no difference worth acting on (under {percent(NOTICEABLE, 1)}, or not the same sign on every seed)",
    }[judgement]
    return f"{head}: {changes}."


def same_load(mine: ScenarioMetrics, base: ScenarioMetrics) -> bool:
    """Whether the two were offered the same requests at the same rate; if not, latencies are no verdict on a configuration."""
    return bool(mine.settings["rate"] == base.settings["rate"])


def slo_text(slo: Row | None) -> str:
    """The service level in words."""
    if slo is None:
        return "none given"
    limits = [
        f"{label} at most {milliseconds(slo[key])}"
        for key, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
        if slo[key] is not None
    ]
    return f"{slo['percentile']:g} % of requests with " + ", and as many with ".join(limits)


def _tiles(mine: ScenarioMetrics, base: ScenarioMetrics) -> Tiles:
    baseline = mine is base

    def tile(label: str, metric: str, value: str, unit: str, write: str, ok: bool | None = None) -> Tile:
        delta = "baseline" if baseline else change(mine.mean(metric), base.mean(metric), unit)
        return Tile(label, value, delta, spread(mine.values(metric), write), ok)

    reuse = mine.mean("reuse_ratio")
    if baseline or reuse is None or base.mean("reuse_ratio") is None:
        points = "baseline" if baseline else "not known from this log"
    else:
        points = f"{'+' if reuse >= (base.mean('reuse_ratio') or 0) else ''}{number(100 * (reuse - (base.mean('reuse_ratio') or 0)))} points"
    gpus = f"{count(mine.settings['gpus'])} GPUs x 24 h"
    return Tiles(
        mine.name,
        (
            Tile("Service level", "met" if mine.meets_slo else "missed",
                 f"{percent(mine.mean('within_slo_share'))} of requests within all limits",
                 spread(mine.values("within_slo_share"), "percent"), mine.meets_slo),
            tile("p95 TTFT", "ttft_p95", milliseconds(mine.mean("ttft_p95")), "ms", "ms"),
            tile("p95 E2E", "e2e_p95", milliseconds(mine.mean("e2e_p95")), "ms", "ms"),
            tile("Goodput", "goodput_rps", f"{number(mine.mean('goodput_rps'))} req/s", "req/s", "number"),
            Tile("Reuse ratio (tokens)", percent(reuse), points, spread(mine.values("reuse_ratio"), "percent")),
            Tile("GPU-hours a day", number(mine.mean("gpu_hours_per_day"), 4), gpus, "as configured"),
        ),
    )  # fmt: skip
