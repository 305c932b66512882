"""The page: sections rendered into one HTML file that needs no network.

Everything that comes from a trace or a study passes through Jinja's autoescape, or through JSON with `<` escaped (chart
specifications). The Content-Security-Policy in the page forbids every request; the charts' library is embedded once.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import vl_convert

from pipeline.folders import write_text
from pipeline.warehouse import read_manifest
from reports.blocks import Chart, Code, Note, Section, Table, Tiles
from reports.figures import count, number
from reports.metrics import scenario_metrics
from reports.queries import Row, Warehouse
from reports.sections import SECTIONS
from schemas.manifest import REPORT_HTML

_EXPOSE = "window.vegaEmbed = vegaEmbed;"
"""All that page.js needs of the charts' library."""

_KINDS = {Chart: "chart", Table: "table", Note: "note", Tiles: "tiles", Code: "code"}


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Render a run folder's report to `out` (default: ``report.html`` in it). Raises RunError for an incomplete folder."""
    target = out if out is not None else run_folder / REPORT_HTML
    write_text(render(run_folder), target)
    return target


def render(run_folder: Path) -> str:
    """The whole page as text. The same run folder gives the same text."""
    read_manifest(run_folder)
    warehouse = Warehouse.open(run_folder)
    with warehouse.connection:
        scenarios = scenario_metrics(warehouse)
        header = warehouse.row("header") or {}
        sections = [build(warehouse, scenarios) for build in SECTIONS]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "template"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: _KINDS[type(block)]
    environment.filters["script_json"] = script_json
    return environment.get_template("page.html.j2").render(
        header=header,
        facts=_facts(header),
        badge=_badge(header, sections),
        sections=sections,
        style=_asset("page.css"),
        script=_asset("page.js"),
        library=_chart_library(),
    )


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element: no `<`, so no tag can end or begin in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return markupsafe.Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _facts(header: Row) -> list[tuple[str, str]]:
    """The header's facts in reading order."""
    span = "" if header["span_s"] is None else f", {number(header['span_s'] / 60)} minutes"
    window = f"from {header['start_utc']}" if header["start_utc"] else "wall-clock start not in the log"
    gpus = f"{header['replicas']} x {header['tensor_parallel']} {header['gpu_title']}"
    fleet = f"{gpus} ({header['gpus']} GPUs), {header['model_title']}"
    return [
        ("trace", f"{header['trace']} ({header['source_format']}): {count(header['requests'])} requests{span}"),
        ("window (UTC)", window),
        ("baseline fleet", fleet),
        ("seeds", str(header["seeds"])),
        ("run", f"{header['run_id']}, Preplay {header['preplay_version']}"),
    ]


def _badge(header: Row, sections: list[Section]) -> str:
    validated = next(section.finding for section in sections if section.number == 11)
    return f"Cost model {header['cost_model']}. {validated}."


@cache
def _chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; a `</script` inside it would end the element early."""
    bundle: str = vl_convert.javascript_bundle(_EXPOSE)
    return bundle.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return resources.files("reports").joinpath("template", name).read_text(encoding="utf-8")
