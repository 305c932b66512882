"""The demo's inputs: the real trace that ships with Preplay, ingested, and the study that is run on it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from pipeline import folders
from pipeline.ingest import ingest

SAMPLE = "mooncake_conversation_trace.jsonl.gz"
TRACE_FOLDER = "conversation.trace"
STUDY = "study.toml"


def prepare_demo(out: Path, *, force: bool, say: Callable[[str], None]) -> Path:
    """Make `out` with the ingested trace and the study file in it; returns the study file.

    Raises RunError where `out` is there and may not be replaced.
    """
    folders.check_absent(out, force=force, own=frozenset({TRACE_FOLDER, STUDY, "run", ".run.partial"}))
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    sample = resources.files("traces").joinpath("samples", SAMPLE)
    with resources.as_file(sample) as log:
        report = ingest([log], out / TRACE_FOLDER, force=True)
    say(
        f"ingested {report.rows_kept:,} of {report.rows_read:,} requests ({report.rows_rejected:,} rejected) "
        f"in {time.perf_counter() - started:.1f} s"
    )
    study = resources.files("pipeline").joinpath("studies", "demo.toml")
    with resources.as_file(study) as file:
        shutil.copyfile(file, out / STUDY)
    return out / STUDY
