"""`manifest.json` of a run folder: what was run, on what, with which versions. The only file with timestamps in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

RUN_VERSION = 1
"""Version of the run folder's layout; a reader refuses any other."""

MANIFEST_FILE = "manifest.json"
STUDY_FILE = "study.toml"
DATABASE_FILE = "preplay.duckdb"
REPORT_HTML = "report.html"
RUN_NAMES = frozenset(
    {
        MANIFEST_FILE,
        STUDY_FILE,
        DATABASE_FILE,
        REPORT_HTML,
        "outcomes",
        "timeline",
        "reuse",
        "tables",
        "preplay.duckdb.wal",
        "inputs.sha256",
    }
)
"""What stands in a run folder; `--force` replaces no folder that holds anything else."""


class Manifest(BaseModel):
    """Everything that is needed to run the study again and to know that it is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = RUN_VERSION
    run_id: str = Field(description="first 12 hex digits of the hash of study, trace and program version")
    name: str
    title: str
    preplay_version: str
    packages: dict[str, str]
    created_utc: str
    machine: str
    study: dict[str, Any] = Field(description="the study, every what-if resolved")
    study_file: str = Field(description="name of the study file as given; its copy here is study.toml")
    study_sha256: str
    trace: str
    trace_sha256: str
    trace_meta: dict[str, Any]
    cost_model: str = Field(description="what the cost model rests on")
    cost_model_notes: tuple[str, ...] = Field(default=(), description="what its calibrations say about themselves")
    durations_s: dict[str, float] = Field(description="wall clock per stage; replay: per scenario and seed")
