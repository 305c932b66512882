"""The page as text: figures come from the queries, hostile names stay text, unknown is said."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from base64 import b64decode
from html.parser import HTMLParser

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.study import run_study
from reports import figures
from reports.blocks import Table
from reports.charts import spec_of
from reports.metrics import scenario_metrics
from reports.page import render, script_json
from reports.queries import Warehouse, query_names, sql_of
from tests.conftest import STUDY


class Page(HTMLParser):
    """Visible text, links and scripts of a page."""

    def __init__(self, text):
        super().__init__()
        self.words, self.links, self.scripts, self._script = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag in ("a", "link", "img", "script", "iframe"):
            self.links += [attributes[key] for key in ("href", "src") if key in attributes]
        if tag in ("script", "style"):
            self._script = attributes.get("class", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.words.append(data)
        elif self._script == "spec":
            self.scripts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(run_folder):
    return Page((run_folder / "report.html").read_text())


def test_the_sections_of_this_version_in_order(run_folder):
    html = (run_folder / "report.html").read_text()
    assert [int(n) for n in re.findall(r'<section id="section-(\d+)"', html)] == [1, 2, 3, 4, 6, 8, 10, 11, 12, 13]
    assert len(html.encode()) < 2_000_000


def test_nothing_points_outside(page):
    assert page.links
    assert all(link.startswith(("#section-", "data:text/csv;base64,")) for link in page.links)
    assert all("http" not in spec for spec in page.scripts)


def test_every_query_says_its_grain_and_runs(run_folder):
    warehouse = Warehouse.open(run_folder)
    with warehouse.connection:
        for name in query_names():
            assert sql_of(name).startswith("-- Grain: "), name
            warehouse.rows(name)


def test_figures_equal_the_queries_run_by_hand(run_folder, page):
    """What the page prints is what the .sql file gives in a plain DuckDB shell inside the folder."""
    with duckdb.connect() as shell:
        shell.execute(f"SET file_search_path = '{run_folder}'")
        shell.execute(f"ATTACH '{run_folder / 'preplay.duckdb'}' AS run (READ_ONLY)")
        shell.execute("USE run")
        rows = shell.execute(sql_of("scenario_seed_metrics")).fetchall()
        names = [column[0] for column in shell.description]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    for scenario in ("baseline", "caching", "speculation", "both"):
        mine = [record for record in records if record["scenario"] == scenario]
        for metric in ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "tpot_p95", "e2e_p95"):
            mean = sum(record[metric] for record in mine) / 2
            assert figures.milliseconds(mean) in page.text, (scenario, metric)


def test_metrics_against_plain_python(run_folder):
    """Percentiles, goodput, reuse ratio: computed again from the outcomes without SQL."""
    import numpy as np

    warehouse = Warehouse.open(run_folder)
    with warehouse.connection:
        metrics = {each.name: each for each in scenario_metrics(warehouse)}
    for name in ("caching", "both"):
        for seed in (1, 2):
            file = run_folder / f"outcomes/scenario={name}/seed={seed}/part-0.parquet"
            rows = pq.ParquetFile(file).read().to_pydict()
            ttft, e2e = np.array(rows["ttft_ms"]), np.array(rows["e2e_ms"])
            tpot = np.array([value or 0 for value in rows["tpot_ms"]])
            row = metrics[name].seeds[seed - 1]
            assert row["ttft_p95"] == pytest.approx(np.quantile(ttft, 0.95))
            assert row["e2e_p50"] == pytest.approx(np.median(e2e))
            assert row["reuse_ratio"] == pytest.approx(sum(rows["hit_tokens"]) / sum(rows["input_tokens"]))
            span = max(np.array(rows["arrival_s"]) + e2e / 1000)
            within = ((ttft <= 10_000) & (tpot <= 100)).sum()
            assert row["goodput_rps"] == pytest.approx(within / span)
            assert row["meets_slo"] == ((ttft <= 10_000).mean() >= 0.95 and (tpot <= 100).mean() >= 0.95)


def test_interaction_by_hand(run_folder):
    warehouse = Warehouse.open(run_folder)
    with warehouse.connection:
        metrics = {each.name: each for each in scenario_metrics(warehouse)}
        rows = warehouse.rows("interaction")
    row = next(each for each in rows if each["metric"] == "E2E p95" and each["seed"] == 1)
    base, caching, speculation, both = (
        metrics[name].seeds[0]["e2e_p95"] for name in ("baseline", "caching", "speculation", "both")
    )
    assert row["interaction_ms"] == pytest.approx(both - caching - speculation + base)


def test_tables_can_be_saved(run_folder, page):
    links = [link for link in page.links if link.startswith("data:")]
    assert len(links) > 10
    for link in links:
        rows = list(csv.reader(io.StringIO(b64decode(link.split(",", 1)[1]).decode())))
        assert rows[0] and all(len(row) == len(rows[0]) for row in rows)


def test_a_formula_in_a_name_stays_text():
    table = Table("t", ("a",), (("=1",),), ("a",), (("=HYPERLINK(1)",),))
    assert b64decode(table.csv_uri.split(",", 1)[1]).decode() == "a\n'=HYPERLINK(1)\n"


HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7*7 }}",
    "\x00\x1b[31m\u2028",
    "x" * 10_000,
]


def test_hostile_names_stay_text(small_trace, tmp_path):
    """Reject reasons, file names, notes and titles come from outside."""
    trace = tmp_path / "t.trace"
    shutil.copytree(small_trace, trace)
    report = json.loads((trace / "ingest.json").read_text())
    report["rejected_by_reason"] = [
        {"reason": text, "rows": 1, "first_file": text, "first_line": 1} for text in HOSTILE
    ]
    report["rows_rejected"] = len(HOSTILE)
    report["rows_read"] += len(HOSTILE)
    (trace / "ingest.json").write_text(json.dumps(report))
    study = tmp_path / "study.toml"
    study.write_text(
        STUDY.format(name="x", trace=trace).replace(
            "seeds = [1, 2]", f"seeds = [1]\ntitle = {json.dumps(HOSTILE[0])}\nnotes = {json.dumps(HOSTILE[1])}"
        )
    )
    html = render(run_study(study, tmp_path / "run"))
    for text in HOSTILE[:2]:
        assert text not in html
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert "{{ 7*7 }}" in Page(html).text
    assert html.count("<script") == html.count("</script>")


def test_json_in_scripts_cannot_close_them():
    assert "<" not in script_json({"a": "</script>\u2028"})
    assert json.loads(script_json({"a": "</script>\u2028"})) == {"a": "</script>\u2028"}


def test_unknown_identity_is_not_zero(azure, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(STUDY.split("[whatif.caching")[0].format(name="x", trace=azure))
    text = Page(render(run_study(study, tmp_path / "run"))).text
    assert "Reusable prompt work: not known from this log" in text
    assert "baseline 2 x 4 h100-sxm; llama-3.1-70b bf16; caching off; no speculation ✓ met not known" in text, (
        "H_tokens in the scenario table"
    )
    assert "That is not zero reuse" in text
    assert "Interaction of caching and speculation: not in this study" in text


def test_without_observed_latencies_nothing_is_validated(page):
    assert "Not validated: the log holds no observed latencies" in page.text


def test_observed_latencies_are_compared(small_trace, tmp_path):
    """A log with timings: the page says the error; here every observation is twice a known prediction."""
    study = tmp_path / "study.toml"
    study.write_text(
        STUDY.format(name="x", trace=small_trace).replace("seeds = [1, 2]", "seeds = [1]").split("[whatif.caching")[0]
    )
    out = run_study(study, tmp_path / "run")
    file = out / "outcomes/scenario=baseline/seed=1/part-0.parquet"
    table = pq.ParquetFile(file).read()
    index = table.column_names.index("observed_ttft_ms")
    doubled = pa.array([2 * value for value in table["ttft_ms"].to_pylist()])
    pq.write_table(table.set_column(index, table.schema.field(index), doubled), file)
    assert "Median absolute error against the log: TTFT 50 %" in Page(render(out)).text


def test_the_demo_badge_and_the_decision(page):
    assert (
        "Cost model h100-sxm calibrated from operator timings (h100-sxm-vllm-0.24; held-out median error" in page.text
    )
    assert (
        "Service level: 95 % of requests with TTFT at most 10.0 s, and as many with TPOT at most 100 ms." in page.text
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1,230"),
        (0.012345, "0.0123"),
        (-183.2, "−183"),
        (None, "not known"),
        (float("nan"), "not known"),
        (999.6, "1,000"),
        (12.0, "12.0"),
    ],
)
def test_numbers(value, text):
    assert figures.number(value) == text


def test_changes_are_signed_and_have_a_unit():
    assert figures.change(650, 833) == "−183 ms (−22 %)"
    assert figures.change(12_000, 1_000) == "+11.0 s (+1,100 %)"
    assert figures.change(1, None) == "not known"
    assert figures.change(5, 0, "req/s") == "+5.00 req/s"
    assert figures.spread([1.0]) == "1 seed: no interval"
    assert figures.spread([1.0, 2.0]) == "1.00 ms to 2.00 ms over 2 seeds"


def test_charts_have_names_and_no_addresses():
    import altair as alt

    spec = spec_of(alt.Chart(alt.Data(values=[])).mark_bar(), "what it shows")
    assert spec["description"] == "what it shows" and "$schema" not in spec


def scenario(name, ttft, tpot=(20.0, 20.0), e2e=(9e3, 9e3), meets=True, **settings):
    """Metrics of a scenario as the decision reads them, two seeds."""
    from reports.metrics import ScenarioMetrics

    base = {"rate": 1.0, "settings_rest": "{}"}
    seeds = [
        {"ttft_p95": a, "tpot_p95": b, "e2e_p95": c, "meets_slo": meets, "within_slo_share": 0.97}
        for a, b, c in zip(ttft, tpot, e2e, strict=True)
    ]
    return ScenarioMetrics(name, {**base, **settings}, tuple(seeds))


@pytest.mark.parametrize(
    ("mine", "begins"),
    [
        (scenario("x", (800.0, 810.0)), "Turn “x” on at this load: p95 TTFT −195 ms (−20 %)"),
        (scenario("x", (800.0, 810.0), settings_rest="{2 replicas}"), "Choose “x” at this load"),
        (scenario("x", (1200.0, 1210.0)), "Leave “x” off at this load: p95 TTFT +205 ms"),
        (scenario("x", (800.0, 810.0), tpot=(30.0, 31.0)), "“x” is a trade at this load"),
        (scenario("x", (999.0, 1001.0)), "“x”: no difference worth acting on"),
        (scenario("x", (900.0, 1100.0)), "“x”: no difference worth acting on"),
        (
            scenario("x", (500.0, 500.0), meets=False),
            "“x”: not offered as a result, it misses the service level (97.0 %",
        ),
        (scenario("x", (1500.0, 1500.0), rate=2.0), "“x”, another load (rate x 2.00), still meets the service level"),
    ],
)
def test_verdicts(mine, begins):
    from reports.sections.decision import verdict

    assert verdict(mine, scenario("baseline", (1000.0, 1000.0))).startswith(begins)


def test_a_scenario_that_serves_nobody_spoils_no_other(small_trace, tmp_path):
    study = tmp_path / "study.toml"
    text = (
        STUDY.format(name="x", trace=small_trace).replace("seeds = [1, 2]", "seeds = [1]").split("[whatif.caching")[0]
    )
    study.write_text(text + "[whatif.tiny.engine]\nmax_model_len = 2\n")
    read = Page(render(run_study(study, tmp_path / "run"))).text
    assert "of the baseline's mean latency is" in read
    assert "“tiny” completed no request" in read
    assert "not like for like" in read
    assert "preplay run study.toml --out runs/x" in read
