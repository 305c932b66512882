"""Section 13: how to get the same numbers again."""

from __future__ import annotations

import json
import shlex

from pipeline.warehouse import read_manifest
from reports.blocks import Block, Code, Note, Section, Table
from reports.metrics import ScenarioMetrics
from reports.queries import Warehouse
from schemas.manifest import STUDY_FILE


def build(warehouse: Warehouse, scenarios: list[ScenarioMetrics]) -> Section:
    """See the module's docstring."""
    del scenarios
    manifest = read_manifest(warehouse.folder)
    facts = {row["key"]: row["value"] for row in warehouse.rows("reproduce")}
    sources = manifest.trace_meta.get("sources", [])
    options = manifest.trace_meta.get("ingest_options", [])
    commands = [
        *(f"# log: {source['name']}, sha256 {source['sha256']}" for source in sources),
        shlex.join(["preplay", "ingest", *(source["name"] for source in sources), "--out", manifest.trace, *options]),
        f"# study file: {manifest.study_file}, below and in the run folder as {STUDY_FILE}; its paths are relative to it",
        shlex.join(["preplay", "run", manifest.study_file, "--out", f"runs/{manifest.name}"]),
    ]
    rows = tuple(
        (key, value if key != "packages" else ", ".join(f"{n} {v}" for n, v in json.loads(value).items()))
        for key, value in facts.items()
    )
    study = (warehouse.folder / STUDY_FILE).read_text(encoding="utf-8")
    blocks: list[Block] = [
        Code("\n".join(commands)),
        Note(
            "The same study, trace and version give the same tables, byte for byte; only manifest.json holds times. Every figure of "
            "this page is a query in reports/sql of the program, and every table here can be saved as CSV."
        ),
        Table("manifest", ("entry", "value"), rows, ("entry", "value"), rows, caption="Manifest", numeric_from=9),
        Note("The study file, as given:"),
        Code(study),
    ]
    return Section(
        13, "Reproduce", f"Run {manifest.run_id}, Preplay {manifest.preplay_version}: two commands repeat it", blocks
    )
