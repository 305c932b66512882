"""`preplay replay` and `preplay elasticities`: one scenario, one seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline import folders
from pipeline.jit import COMPILING, compiled_before
from pipeline.scenario import ResolvedScenario, run_scenario
from pipeline.schedule import elasticity_rows, scheduled
from pipeline.study import CheckedStudy, Progress, check_study
from schemas.errors import StudyError
from schemas.study import checked_name


def replay_one(
    file: Path, scenario: str, seed: int | None, out: Path | None, *, force: bool, say: Progress = lambda _line: None
) -> tuple[dict[str, Any], Path]:
    """Replay one scenario of a study: (summary, folder with outcomes.parquet and timeline.parquet).

    Raises StudyError for a scenario that the study lacks, and whatever `check_study` raises.
    """
    checked = check_study(file)
    resolved = _scenario_of(checked, scenario)
    folder = out if out is not None else Path(f"{checked.study.name}.{checked_name(scenario)}.replay")
    folders.check_absent(folder, force=force, own=frozenset({"outcomes.parquet", "timeline.parquet"}))
    chosen = checked.study.seeds[0] if seed is None else seed
    if not compiled_before():
        say(COMPILING)
    outcomes, timeline = run_scenario(resolved, checked.trace, chosen)
    partial = folders.partial_of(folder)
    with folders.claimed(partial, keep=False):
        folders.write_parquet(outcomes, partial / "outcomes.parquet")
        folders.write_parquet(timeline, partial / "timeline.parquet")
        folders.publish(partial, folder)
    return summary(resolved, chosen, outcomes), folder


def elasticities_of(
    file: Path, scenario: str, seed: int | None, *, say: Progress = lambda _line: None
) -> list[dict[str, Any]]:
    """Elasticities of one scenario's percentiles on its fixed schedule: `elasticity_rows`. Raises as `replay_one`."""
    checked = check_study(file)
    resolved = _scenario_of(checked, scenario)
    if not compiled_before():
        say(COMPILING)
    schedule = scheduled(resolved, checked.trace, checked.study.seeds[0] if seed is None else seed)
    return elasticity_rows(schedule, resolved.hardware.cost_model)


def _scenario_of(checked: CheckedStudy, name: str) -> ResolvedScenario:
    known = {resolved.name: resolved for resolved in checked.scenarios}
    if name not in known:
        raise StudyError(f"no scenario '{name}'", file=checked.file, mend=f"it has: {', '.join(known)}")
    return known[name]


def summary(resolved: ResolvedScenario, seed: int, outcomes: pa.Table) -> dict[str, Any]:
    """Headline of one replay. Percentiles are exact, over completed requests; null = nothing to take them of."""
    replayed = outcomes.num_rows
    outcomes = outcomes.filter(pc.invert(outcomes["warmup"]))
    done = outcomes.filter(pc.equal(outcomes["status"], "completed"))
    capacity = resolved.hardware.capacity

    def total(column: str) -> int:
        return pc.sum(done[column]).as_py() or 0

    def percentile(column: str, p: float) -> float | None:
        values = done[column].drop_null()
        return None if len(values) == 0 else pc.quantile(values, q=p / 100, interpolation="linear")[0].as_py()

    steps, accepted = total("spec_steps"), total("accepted_tokens")
    hits_known = done["hit_tokens"].null_count == 0
    return {
        "scenario": resolved.name,
        "seed": seed,
        "requests": outcomes.num_rows,
        "completed": done.num_rows,
        "refused": outcomes.num_rows - done.num_rows,
        "gpus": resolved.scenario.fleet.gpus,
        "kv_pool_tokens_per_replica": capacity.pool_tokens,
        "reuse_ratio_tokens": total("hit_tokens") / total("input_tokens") if done.num_rows and hits_known else None,
        **(
            {"of_these_hit_tokens_inferred": total("hit_tokens_inferred")}
            if resolved.names is not None and hits_known
            else {}
        ),
        **({"warmup_requests_left_out": replayed - outcomes.num_rows} if replayed > outcomes.num_rows else {}),
        **{f"ttft_p{p}_ms": percentile("ttft_ms", p) for p in (50, 95, 99)},
        **{f"tpot_p{p}_ms": percentile("tpot_ms", p) for p in (50, 95)},
        **{f"e2e_p{p}_ms": percentile("e2e_ms", p) for p in (50, 95)},
        "preemptions": total("preemptions"),
        **({"acceptance_length": 1 + accepted / steps} if steps else {}),
    }
