"""A study: every scenario x seed replayed, and everything about it in one run folder.

Order: check all scenarios (nothing runs if one is impossible), reuse profile, replays, tables, database, and whatever the
caller wants in the folder before it gets its name (the report). The folder is made under a hidden name; each file appears
whole; `resume` keeps the replays that a killed run of the same inputs had finished.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import folders, warehouse
from pipeline.cost.build import notes_of, provenance
from pipeline.jit import COMPILING, compiled_before
from pipeline.reuse import reuse_profile
from pipeline.reuse_tables import curve_table, distance_table, requests_table
from pipeline.scenario import ResolvedScenario, resolve, run_scenario
from pipeline.schedule import ELASTICITY_SCHEMA, elasticity_rows, scheduled
from pipeline.study_tables import ingest_tables, scenarios_table, slo_table
from pipeline.trace import Trace, read_trace
from schemas.errors import InputError, PreplayError, RunError
from schemas.manifest import MANIFEST_FILE, RUN_NAMES, STUDY_FILE, Manifest
from schemas.study import Study, load_study
from schemas.trace import TRACE_FILE

Progress = Callable[[str], None]
"""Called with a line of talk; the command line prints it on stderr."""

PACKAGES = ("polars", "duckdb", "pyarrow", "numba", "numpy", "torch", "altair", "pydantic")
INPUTS_FILE = "inputs.sha256"


@dataclass(frozen=True)
class CheckedStudy:
    """A study whose every scenario can be replayed."""

    file: Path
    study: Study
    trace: Trace
    scenarios: tuple[ResolvedScenario, ...]


def check_study(file: Path) -> CheckedStudy:
    """Load a study and its trace and resolve every scenario. Raises the first thing that is wrong, placed."""
    study = load_study(file)
    try:
        trace = read_trace(file.parent / study.trace)
    except InputError as problem:
        raise InputError(
            f"{problem.problem}: {problem.file}",
            file=file,
            place="trace",
            mend=f"{problem.mend or 'name another'} (paths are relative to the study file)",
        ) from None
    scenarios = []
    for name, scenario in study.scenarios.items():
        try:
            scenarios.append(resolve(name, scenario, trace, study.timeline_interval_s))
        except PreplayError as problem:
            raise type(problem)(problem.problem, file=file, place=problem.place, mend=problem.mend) from None
    return CheckedStudy(file, study, trace, tuple(scenarios))


def run_study(
    file: Path,
    out: Path,
    *,
    force: bool = False,
    resume: bool = False,
    say: Progress = lambda _line: None,
    finish: Callable[[Path], None] = lambda _folder: None,
) -> Path:
    """Run the study `file` into the folder `out`; `finish` is called on the complete folder before it gets its name.

    Raises StudyError, CatalogError, CapacityError, InputError (bad input), RunError (the folder).
    """
    folders.check_absent(out, force=force, own=RUN_NAMES)
    started = time.perf_counter()
    checked = check_study(file)
    durations: dict[str, float] = {"check": time.perf_counter() - started}
    if not compiled_before():
        say(COMPILING)
    partial = folders.partial_of(out)
    inputs = _inputs_digest(checked, _NOT_REPLAYED)
    with folders.claimed(partial, keep=resume):
        _check_same_inputs(partial, inputs, resume=resume)
        shutil.copyfile(file, partial / STUDY_FILE)
        _reuse(checked.trace, partial, durations)
        _replays(checked, partial, durations, say)
        _elasticities(checked, partial, durations, say)
        _tables(checked, partial)
        manifest = _manifest(checked, _inputs_digest(checked, set()), durations)
        folders.write_text(manifest.model_dump_json(indent=2) + "\n", partial / MANIFEST_FILE)
        warehouse.create_database(partial)
        finish(partial)
        folders.publish(partial, out)
        (out / INPUTS_FILE).unlink(missing_ok=True)  # last: a folder without it is never taken for one to resume
    return out


_NOT_REPLAYED = {"name", "title", "notes", "slo", "sensitivity"}
"""What a study says about its replays, not to them: changing it leaves finished replays as good as they were."""


def _inputs_digest(checked: CheckedStudy, without: set[str]) -> str:
    """Hash of all that decides the outputs: the resolved study, the trace's bytes, the program's version."""
    digest = hashlib.sha256()
    digest.update(checked.study.model_dump_json(exclude=without).encode())
    digest.update(file_sha256(checked.trace.path / TRACE_FILE).encode())
    digest.update(metadata.version("preplay").encode())
    return digest.hexdigest()


def _check_same_inputs(partial: Path, inputs: str, *, resume: bool) -> None:
    stamp = partial / INPUTS_FILE
    same = stamp.is_file() and stamp.read_text(encoding="utf-8") == inputs
    if resume and not same and any(each.name != folders.LOCK_FILE for each in partial.iterdir()):
        raise RunError(
            "what a killed run left there came from another study, trace or version",
            file=partial,
            mend="run without --resume to start afresh",
        )
    folders.write_text(inputs, stamp)


def _reuse(trace: Trace, folder: Path, durations: dict[str, float]) -> None:
    """The clock-free profile; empty tables where identity is unknown."""
    started = time.perf_counter()
    profile = None
    if trace.meta.prefix_identity != "unknown" and trace.meta.block_tokens is not None:
        profile = reuse_profile(trace.block_offsets, trace.block_ids, trace.input_tokens, trace.meta.block_tokens)
    folders.write_parquet(curve_table(profile), folder / "reuse/curve.parquet")
    folders.write_parquet(requests_table(profile), folder / "reuse/requests.parquet")
    folders.write_parquet(distance_table(profile), folder / "reuse/distance.parquet")
    durations["reuse"] = time.perf_counter() - started


def _replays(checked: CheckedStudy, folder: Path, durations: dict[str, float], say: Progress) -> None:
    """Every scenario and seed that isn't there yet, on all cores (the loop releases the interpreter's lock)."""
    units = [(resolved, seed) for resolved in checked.scenarios for seed in checked.study.seeds]
    todo = [unit for unit in units if not _unit_done(folder, *unit)]
    if len(todo) < len(units):
        say(f"resuming: {len(units) - len(todo)} of {len(units)} replays are there already")

    def work(unit: tuple[ResolvedScenario, int]) -> tuple[str, float]:
        resolved, seed = unit
        started = time.perf_counter()
        outcomes, timeline = run_scenario(resolved, checked.trace, seed)
        # The timeline goes first: a unit counts as done when its outcomes are there.
        folders.write_parquet(timeline, _unit_file(folder, "timeline", resolved.name, seed))
        folders.write_parquet(outcomes, _unit_file(folder, "outcomes", resolved.name, seed))
        return f"{resolved.name}, seed {seed}", time.perf_counter() - started

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for number, (label, seconds) in enumerate(pool.map(work, todo), start=1):
            durations[f"replay {label}"] = seconds
            say(f"replayed {label} ({number} of {len(todo)}): {seconds:.2f} s")


def _elasticities(checked: CheckedStudy, folder: Path, durations: dict[str, float], say: Progress) -> None:
    """What each percentile is bound by, one scenario after the other: torch uses the cores by itself."""
    started = time.perf_counter()
    study = checked.study
    chosen = {"none": (), "baseline": checked.scenarios[:1], "all": checked.scenarios}[study.sensitivity]
    rows: list[dict[str, Any]] = []
    for resolved in chosen:
        schedule = scheduled(resolved, checked.trace, study.seeds[0])
        found = elasticity_rows(schedule, resolved.hardware.cost_model)
        rows += [{"scenario": resolved.name, "seed": study.seeds[0]} | row for row in found]
    folders.write_parquet(pa.Table.from_pylist(rows, schema=ELASTICITY_SCHEMA), folder / "tables/elasticities.parquet")
    durations["elasticities"] = time.perf_counter() - started
    if rows:
        say(f"elasticities of {len(chosen)} scenario(s): {durations['elasticities']:.2f} s")


def _unit_file(folder: Path, kind: str, scenario: str, seed: int) -> Path:
    return folder / kind / f"scenario={scenario}" / f"seed={seed}" / "part-0.parquet"


def _unit_done(folder: Path, resolved: ResolvedScenario, seed: int) -> bool:
    return _unit_file(folder, "outcomes", resolved.name, seed).is_file()


def _tables(checked: CheckedStudy, folder: Path) -> None:
    tables = {
        "scenarios": scenarios_table(checked.scenarios, checked.study, checked.trace),
        "slo": slo_table(checked.study.slo),
        **ingest_tables(checked.trace.report),
    }
    for name, table in tables.items():
        folders.write_parquet(table, folder / "tables" / f"{name}.parquet")


def _manifest(checked: CheckedStudy, inputs: str, durations: dict[str, float]) -> Manifest:
    study = checked.study
    return Manifest(
        run_id=inputs[:12],
        name=study.name,
        title=study.title or study.name,
        preplay_version=metadata.version("preplay"),
        packages={name: metadata.version(name) for name in PACKAGES},
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        study=study.model_dump(mode="json"),
        study_file=checked.file.name,
        study_sha256=file_sha256(checked.file),
        trace=study.trace,
        trace_sha256=file_sha256(checked.trace.path / TRACE_FILE),
        trace_meta=checked.trace.meta.model_dump(mode="json"),
        cost_model=provenance(resolved.hardware for resolved in checked.scenarios),
        cost_model_notes=notes_of(resolved.hardware for resolved in checked.scenarios),
        durations_s={name: round(seconds, 3) for name, seconds in durations.items()},
    )


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
