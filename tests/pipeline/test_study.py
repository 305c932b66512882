"""A study end to end: the run folder, determinism, resume, and what can't be run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from pipeline import folders
from pipeline.study import check_study, run_study
from pipeline.warehouse import connect, query, read_manifest
from schemas.errors import CapacityError, CatalogError, InputError, QueryError, RunError, StudyError
from schemas.outcome import COMPONENTS, OUTCOME_SCHEMA, TIMELINE_SCHEMA
from tests.conftest import ROOT, STUDY


def study_at(folder, trace, text=STUDY, **changes):
    file = folder / "study.toml"
    file.write_text(text.format(name="x", trace=trace))
    return file


def tables(folder):
    """Every data file of a run by its path; the manifest holds times and the database page order."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in ("manifest.json", "preplay.duckdb")
    }


def test_the_run_folder_is_as_documented(run_folder):
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "manifest.json", "outcomes", "preplay.duckdb", "report.html", "reuse", "study.toml", "tables", "timeline",
    ]  # fmt: skip
    manifest = read_manifest(run_folder)
    assert manifest.study["baseline"]["engine"]["block_tokens"] == 16, "resolved, defaults included"
    assert "h100-sxm calibrated from operator timings (h100-sxm-vllm-" in manifest.cost_model
    for scenario in ("baseline", "caching", "speculation", "both"):
        for seed in (1, 2):
            part = f"scenario={scenario}/seed={seed}/part-0.parquet"
            outcomes = pq.ParquetFile(run_folder / "outcomes" / part).read()
            assert outcomes.schema.equals(OUTCOME_SCHEMA)
            assert outcomes.num_rows == 300
            assert pq.ParquetFile(run_folder / "timeline" / part).schema_arrow.equals(TIMELINE_SCHEMA)


def test_latencies_reconcile(run_folder):
    """The parts of every request's latency add up to it; components add up to busy time."""
    _, rows = query(
        run_folder,
        "SELECT max(abs(queue_ms + prefill_ms + first_output_ms - ttft_ms)), max(abs(ttft_ms + decode_ms - e2e_ms)), "
        "max(abs(decode_draft_ms + decode_target_ms + decode_rest_ms - decode_ms)), "
        "min(least(queue_ms, prefill_ms, first_output_ms, decode_draft_ms, decode_target_ms, decode_rest_ms)), "
        "max(abs(coalesce(tpot_ms, 0) * (output_tokens - 1) - decode_ms)), "
        "bool_and(output_tokens = emitting_steps + accepted_tokens - trimmed_tokens), count(*) FROM outcomes",
    )
    ttft, e2e, decode, least, tpot, tokens, count = rows[0]
    assert max(ttft, e2e, decode, tpot) < 1e-6
    assert least > -1e-6
    assert tokens and count == 300 * 4 * 2
    parts = " + ".join(f"{name}_s" for name in COMPONENTS)
    _, rows = query(run_folder, f"SELECT bool_and({parts} <= interval_s * 1.2) FROM timeline WHERE steps > 0")
    assert rows == [(True,)]


def test_without_speculation_no_drafts_without_caching_no_hits(run_folder):
    _, rows = query(
        run_folder,
        "SELECT scenario, sum(draft_tokens) > 0, sum(hit_tokens) > 0, max(decode_draft_ms) > 0 FROM outcomes GROUP BY 1 ORDER BY 1",
    )
    assert rows == [
        ("baseline", False, False, False),
        ("both", True, True, True),
        ("caching", False, True, False),
        ("speculation", True, False, True),
    ]


def test_same_study_same_bytes(run_folder, study_file, tmp_path):
    again = run_study(study_file, tmp_path / "again")
    first, second = tables(run_folder), tables(again)
    first.pop("report.html")
    assert first == second


def test_a_moved_run_still_opens_and_so_does_a_plain_shell(run_folder, tmp_path):
    moved = tmp_path / "it's moved"
    shutil.copytree(run_folder, moved)
    assert query(moved, "SELECT count(*) FROM outcomes")[1] == [(2400,)]
    code = (
        "import duckdb; shell = duckdb.connect('preplay.duckdb', read_only=True); "
        "print(shell.execute('SELECT count(*) FROM outcomes').fetchone()[0])"
    )
    shell = subprocess.run([sys.executable, "-c", code], cwd=moved, capture_output=True, text=True, check=True)
    assert shell.stdout.strip() == "2400"
    with duckdb.connect(str(moved / "preplay.duckdb"), read_only=True) as connection:
        tags = connection.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'preplay'").fetchall()
    assert tags[0][0]["storage_version"].startswith("v1.4"), "readable by DuckDB 1.4 shells"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DROP VIEW outcomes", "DROP is not a query"),
        ("CREATE TABLE x AS SELECT 1", "CREATE is not a query"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("", "0 statements"),
        ("SELECT * FROM nowhere", "nowhere"),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM read_csv('/etc/passwd')", "disabled"),
        ("COPY (SELECT 1) TO '/tmp/preplay_must_not_exist.csv'", "COPY is not a query"),
        ("SELECT * FROM read_parquet('../../*/tables/slo.parquet')", "disabled"),
        ("SET enable_external_access = true", "SET is not a query"),
        ("INSTALL httpfs", "is not a query"),
    ],
)
def test_queries_are_read_only_and_boxed_in(run_folder, sql, message):
    with pytest.raises(QueryError, match=message) as caught:
        query(run_folder, sql)
    assert "\n" not in caught.value.line()


def test_the_sandbox_cannot_be_reopened(run_folder):
    with connect(run_folder) as connection, pytest.raises(duckdb.Error, match="locked"):
        connection.execute("SET enable_external_access = true")


def test_resume_does_only_what_is_missing(run_folder, study_file, tmp_path, monkeypatch):
    """A run that dies after some replays: the next one keeps them and ends with the same bytes."""
    out = tmp_path / "run"
    calls = []
    real = folders.write_parquet

    def dying(table, file):
        if len(calls) >= 7:
            raise KeyboardInterrupt
        calls.append(file)
        real(table, file)

    monkeypatch.setattr(folders, "write_parquet", dying)
    with pytest.raises(KeyboardInterrupt):
        run_study(study_file, out)
    monkeypatch.undo()
    assert not out.exists(), "a killed run never looks finished"
    partial = folders.partial_of(out)
    kept = {file: file.stat().st_mtime_ns for file in partial.glob("outcomes/*/*/*.parquet")}
    said = []
    run_study(study_file, out, resume=True, say=said.append)
    assert not partial.exists()
    assert {out / file.relative_to(partial): stamp for file, stamp in kept.items()}.items() <= {
        file: file.stat().st_mtime_ns for file in out.glob("outcomes/*/*/*.parquet")
    }.items()
    expected = tables(run_folder)
    expected.pop("report.html")
    assert tables(out) == expected
    if kept:
        assert said[0] == f"resuming: {len(kept)} of 8 replays are there already"


def test_a_killed_process_leaves_nothing_that_looks_finished(study_file, tmp_path):
    out = tmp_path / "run"
    code = (
        "from pathlib import Path; from pipeline.study import run_study; "
        f"run_study(Path({str(study_file)!r}), Path({str(out)!r}))"
    )
    for wait in (0.6, 1.0, 1.4):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ})
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() or read_manifest(out)
        shutil.rmtree(out, ignore_errors=True)
    run_study(study_file, out)
    assert read_manifest(out).name == "small"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_resume_refuses_what_another_study_left(study_file, small_trace, tmp_path):
    out = tmp_path / "run"
    partial = folders.partial_of(out)
    partial.mkdir()
    (partial / "inputs.sha256").write_text("another")
    with pytest.raises(RunError, match="came from another study"):
        run_study(study_file, out, resume=True)
    run_study(study_file, out)
    with pytest.raises(RunError, match="is there already"):
        run_study(study_file, out)


def test_two_runs_into_one_folder(study_file, tmp_path):
    out = tmp_path / "run"
    with folders.claimed(folders.partial_of(out), keep=False), pytest.raises(RunError, match="another process"):
        run_study(study_file, out)


def test_scenarios_that_cannot_run_say_why_before_anything_runs(small_trace, azure, tmp_path):
    def fails(error, message, extra="", trace=small_trace):
        file = study_at(tmp_path, trace, STUDY + extra)
        with pytest.raises(error, match=message) as caught:
            run_study(file, tmp_path / "out")
        assert str(file) in caught.value.line()
        assert not (tmp_path / "out").exists() and not folders.partial_of(tmp_path / "out").exists()

    fails(
        CapacityError,
        r"study\.toml:big: llama-3.1-70b \(bf16\) does not fit 1 x h100-sxm",
        "[whatif.big.fleet]\ntensor_parallel = 1\n",
    )
    fails(CatalogError, r"study\.toml:odd: unknown GPU 'h100'; known: a100-80g", '[whatif.odd.fleet]\ngpu = "h100"\n')
    fails(
        StudyError,
        r"caching\.engine\.block_tokens: block_tokens = 24 neither divides",
        "[baseline.engine]\nblock_tokens = 24\n",
    )
    fails(
        StudyError,
        r"long: max_model_len = 200000, but llama-3.1-70b has a context of 131072",
        "[whatif.long.engine]\nmax_model_len = 200000\n",
    )
    fails(StudyError, r"caching\.prefix_cache\.enabled: prefix caching is on, but the trace does not tell", trace=azure)
    with pytest.raises(InputError, match="no such trace"):
        check_study(study_at(tmp_path, tmp_path / "nothing"))


def test_what_is_too_long_is_refused_or_clipped_and_counted(small_trace, tmp_path):
    """A longest sequence of 8,000 tokens: prompts from 8,000 tokens on are refused, outputs end at 8,000 together."""
    text = STUDY.split("[whatif.caching")[0] + "[baseline.engine]\nmax_model_len = 8000\n"
    out = run_study(study_at(tmp_path, small_trace, text), tmp_path / "run")
    table = pq.ParquetFile(out / "outcomes/scenario=baseline/seed=1/part-0.parquet").read().to_pylist()
    trace = pq.read_table(small_trace / "trace.parquet").to_pylist()
    assert any(row["status"] == "refused" for row in table) and any(row["clipped"] for row in table)
    for row, logged in zip(table, trace, strict=True):
        fits = logged["input_tokens"] < 8000
        assert row["status"] == ("completed" if fits else "refused")
        assert row["output_tokens"] == (min(logged["output_tokens"], 8000 - logged["input_tokens"]) if fits else 0)
        assert row["clipped"] == (fits and row["output_tokens"] < logged["output_tokens"])
        assert (row["ttft_ms"] is None) == (not fits)
    from reports.page import render

    assert "Refused requests are longer" in render(out) and "end at the engine" in render(out)


def test_a_trace_without_identity_runs_and_says_unknown(azure, tmp_path):
    text = STUDY.split("[whatif.caching")[0]
    out = run_study(study_at(tmp_path, azure, text), tmp_path / "run")
    assert query(out, "SELECT count(*) FROM reuse_curve")[1] == [(0,)]
    assert query(out, "SELECT prefix_identity, distinct_blocks FROM ingest")[1] == [("unknown", None)]
    assert query(out, "SELECT count(hit_tokens) FROM outcomes")[1] == [(0,)], "unknown is not zero, caching on or off"


def test_places_that_cannot_be_written(study_file, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (Path("/proc/nowhere/run"), tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="can't be written"):
            run_study(study_file, out)


def test_not_a_run_folder(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        query(tmp_path, "SELECT 1")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match="another version or damaged"):
        query(tmp_path, "SELECT 1")


def test_a_run_with_a_missing_table_says_so(run_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run_folder, broken)
    (broken / "tables/slo.parquet").unlink()
    with pytest.raises(RunError, match="a table is missing"):
        query(broken, "SELECT 1")


def test_the_manifest_names_what_was_run(run_folder, study_file):
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["trace_meta"]["prefix_identity"] == "known"
    assert len(manifest["run_id"]) == 12
    assert (run_folder / "study.toml").read_bytes() == Path(study_file).read_bytes()


def test_force_replaces_a_run_and_nothing_else(study_file, run_folder, tmp_path):
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("mine")
    with pytest.raises(
        RunError, match=r"documents: holds something else \('thesis.txt'\): --force does not replace it"
    ):
        run_study(study_file, documents, force=True)
    assert (documents / "thesis.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="is no folder"):
        run_study(study_file, tmp_path / "file", force=True)
    old = tmp_path / "old"
    shutil.copytree(run_folder, old)
    run_study(study_file, old, force=True)
    assert not (old / "report.html").exists(), "replaced as a whole"


def test_interval_means_are_exact_whatever_the_width(small_trace, tmp_path):
    """Used and cached blocks never exceed the pool, also in intervals far shorter than a step."""
    text = STUDY.replace("seeds = [1, 2]", "seeds = [1]\ntimeline_interval_s = 0.05")
    out = run_study(study_at(tmp_path, small_trace, text), tmp_path / "run")
    _, rows = query(
        out,
        "SELECT max((kv_used_blocks_mean + kv_cached_blocks_mean) / pool_blocks), max(running_mean / max_sequences) "
        "FROM timeline JOIN scenarios USING (scenario)",
    )
    assert rows[0][0] <= 1 + 1e-9 and rows[0][1] <= 1 + 1e-9
    _, rows = query(
        out,
        "SELECT t.scenario, t.request_s, o.request_s FROM (SELECT scenario, sum((waiting_mean + running_mean) * interval_s) AS request_s "
        "FROM timeline GROUP BY 1) AS t JOIN (SELECT scenario, sum(e2e_ms) / 1000 AS request_s FROM outcomes GROUP BY 1) AS o USING (scenario)",
    )
    for _, integral, latency in rows:
        # Little's law: requests in the fleet over time are latencies added up, but for arrivals during a step, who are seen at its end.
        assert integral == pytest.approx(latency, rel=0.05) and integral <= latency + 1e-6


def test_unknown_hits_are_null_in_the_timeline_too(azure, tmp_path):
    out = run_study(study_at(tmp_path, azure, STUDY.split("[whatif.caching")[0]), tmp_path / "run")
    assert query(out, "SELECT count(hit_tokens), count(*) > 0 FROM timeline")[1] == [(0, True)]


def test_absurd_intervals_are_refused(small_trace, tmp_path):
    text = STUDY.replace("seeds = [1, 2]", "timeline_interval_s = 1e-7")
    with pytest.raises(StudyError, match="over 200,000 intervals"):
        run_study(study_at(tmp_path, small_trace, text), tmp_path / "run")


def test_resume_takes_nothing_without_its_stamp(study_file, run_folder, tmp_path):
    """A complete folder under the hidden name whose stamp is gone: it could be anybody's."""
    out = tmp_path / "run"
    shutil.copytree(run_folder, folders.partial_of(out))
    with pytest.raises(RunError, match="came from another study"):
        run_study(study_file, out, resume=True)


def test_resume_survives_a_change_that_no_replay_depends_on(study_file, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def dying(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(study_file, out, finish=dying)
    changed = tmp_path / "study.toml"
    changed.write_text(study_file.read_text().replace("tpot_ms = 100", "tpot_ms = 1"))
    said = []
    run_study(changed, out, resume=True, say=said.append)
    assert said[0] == "resuming: 8 of 8 replays are there already"
    assert query(out, "SELECT tpot_ms FROM slo")[1] == [(1.0,)]


def test_the_two_by_two_compares_like_with_like(small_trace, tmp_path):
    """Another engine setting, or another speculation in `both`, and there is no 2 x 2."""
    from reports.queries import Warehouse

    for extra in ("[whatif.both.engine]\nmax_sequences = 100\n", ""):
        text = STUDY.replace("seeds = [1, 2]", "seeds = [1]") + extra
        if not extra:
            text = text.replace(
                "k = 2\nconditional_acceptance = [0.7, 0.6]", "k = 1\nconditional_acceptance = [0.7]", 1
            )
        out = run_study(study_at(tmp_path, small_trace, text), tmp_path / "run", force=True)
        warehouse = Warehouse.open(out)
        with warehouse.connection:
            assert warehouse.rows("interaction") == []
