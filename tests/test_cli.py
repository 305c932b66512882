"""The command line: output formats, exit codes, one line for every mistake."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import AZURE, CONVERSATION, ROOT, STUDY


def preplay(*arguments, cwd=None, stdin=None):
    """(exit code, stdout, stderr) of a command, run as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *map(str, arguments)],
        cwd=cwd or ROOT, capture_output=True, text=True, input=stdin, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def one_line(stderr):
    """Errors are one line, and never a traceback."""
    assert "Traceback" not in stderr
    lines = stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("preplay: ")]) == 1, stderr
    return lines[-1]


def test_version_and_help():
    code, out, _ = preplay("--version")
    assert code == 0 and out.startswith("preplay 0.")
    code, out, _ = preplay("--help")
    assert code == 0
    for command in ("ingest", "reuse", "replay", "run", "report", "query", "catalog", "demo"):
        assert command in out


def test_ingest_reuse_and_formats(tmp_path):
    code, out, err = preplay("ingest", CONVERSATION, "-o", tmp_path / "t", "--format", "json")
    assert code == 0
    (record,) = json.loads(out)
    assert (record["rows_read"], record["rows_kept"], record["rows_rejected"]) == (12031, 12031, 0)
    assert "mooncake: the first line is a JSON object" in err
    code, out, _ = preplay(
        "reuse", tmp_path / "t", "-c", "1000", "-c", 10000, "--format", "csv", "--model", "llama-3.1-70b"
    )
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [int(row["hit_blocks"]) for row in rows] == [12847, 61046]
    assert float(rows[0]["capacity_gib"]) == 1000 * 512 * 320 * 1024 / 1024**3
    code, out, err = preplay("reuse", tmp_path / "t", "-o", tmp_path / "profile", "-q")
    assert code == 0 and "ceiling_token_ratio" in out and "0.37338" in out and err == ""
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "curve.parquet", "distance.parquet", "requests.parquet",
    ]  # fmt: skip


def test_unknown_identity_is_said_everywhere(tmp_path):
    code, out, err = preplay("ingest", AZURE, "-o", tmp_path / "t")
    assert code == 0 and "not known from this log" in out and "unknown" in err
    code, out, _ = preplay("reuse", tmp_path / "t")
    assert code == 0 and out.count("not known from this log") == 4
    study = STUDY.format(name="x", trace=tmp_path / "t").split("[whatif.caching")[0]
    (tmp_path / "study.toml").write_text(study)
    code, out, _ = preplay("replay", tmp_path / "study.toml", "-o", tmp_path / "r")
    assert code == 0 and re.search(r"reuse_ratio_tokens +unknown", out)
    code, out, _ = preplay("reuse", tmp_path / "t", "-f", "json")
    assert json.loads(out)[0]["ceiling_token_ratio"] is None
    assert ",,," in preplay("reuse", tmp_path / "t", "-f", "csv")[1].splitlines()[1]


def test_catalog():
    code, out, _ = preplay("catalog", "models", "-f", "json")
    assert code == 0 and {entry["name"] for entry in json.loads(out)} >= {"llama-3.1-70b", "deepseek-v3"}
    assert preplay("catalog", "gpus")[0] == 0
    code, _, err = preplay("catalog", "tpus")
    assert code == 2 and "known: gpus, models" in one_line(err)


def test_replay_one_scenario(study_file, tmp_path):
    code, out, err = preplay("replay", study_file, "-s", "both", "--seed", 2, "-o", tmp_path / "r", "-f", "json")
    assert code == 0, err
    (record,) = json.loads(out)
    assert record["completed"] == 300 and record["seed"] == 2
    assert record["acceptance_length"] == pytest.approx(1 + 0.7 + 0.7 * 0.6, abs=0.02)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["outcomes.parquet", "timeline.parquet"]
    code, _, err = preplay("replay", study_file, "-s", "nothing")
    assert code == 2 and "it has: baseline, caching, speculation, both" in one_line(err)


def test_elasticities_of_one_scenario(study_file):
    code, out, err = preplay("elasticities", study_file, "-s", "both", "-f", "json")
    assert code == 0, err
    rows = {row["metric"]: row for row in json.loads(out)}
    assert rows["tpot_p95"]["elasticity_all"] == pytest.approx(1.0)
    assert rows["ttft_p95"]["elasticity_memory_bandwidth"] < 0
    code, _, err = preplay("elasticities", study_file, "-s", "nothing")
    assert code == 2 and "it has: baseline" in one_line(err)


def test_calibrate_from_this_machine(tmp_path):
    file = tmp_path / "mine.json"
    code, out, err = preplay(
        "calibrate", "gpu", "--gpu", "l40s", "--device", "cpu", "--quick", "-o", file, "-f", "json"
    )
    assert code == 0, err
    assert {row["part"].split()[0] for row in json.loads(out)} >= {"gemm"}
    assert json.loads(file.read_text())["gpu"] == "l40s"
    code, out, err = preplay("estimate", "llama-3.1-8b", "l40s", "--calibration", file, "--summary")
    assert code == 0 and "defaults for" in out
    code, _, err = preplay("calibrate", "gpu", "--gpu", "l40s", "--device", "cuda:99", "-o", tmp_path / "no.json")
    assert code == 2 and "cuda" in one_line(err).lower()


def test_query_formats_and_sources(run_folder, tmp_path):
    sql = "SELECT scenario, count(*) AS n, NULL AS nothing FROM outcomes GROUP BY 1 ORDER BY 1 LIMIT 1"
    assert json.loads(preplay("query", run_folder, sql, "-f", "json")[1]) == [
        {"scenario": "baseline", "n": 600, "nothing": None}
    ]
    assert preplay("query", run_folder, sql, "-f", "csv")[1] == "scenario,n,nothing\nbaseline,600,\n"
    table = preplay("query", run_folder, sql)[1]
    assert "baseline" in table and "unknown" in table
    (tmp_path / "q.sql").write_text("-- a comment first\nSELECT 1 AS one")
    assert preplay("query", run_folder, "--file", tmp_path / "q.sql", "-f", "csv")[1] == "one\n1\n"
    assert preplay("query", run_folder, "-", "-f", "csv", stdin="SELECT 2 AS two")[1] == "two\n2\n"
    assert preplay("query", run_folder, "-- hello\nSELECT 3 AS three", "-f", "csv")[1] == "three\n3\n"
    code, _, err = preplay("query", run_folder)
    assert code == 2 and "--file" in one_line(err)
    code, _, err = preplay("query", run_folder, "DROP VIEW outcomes")
    assert code == 2 and "read only" in one_line(err)


def test_run_and_report(study_file, tmp_path):
    code, out, err = preplay("run", study_file, "-o", tmp_path / "run", "--no-report")
    assert code == 0 and out.strip() == str(tmp_path / "run")
    assert "replayed both, seed 2 (8 of 8)" in err
    assert not (tmp_path / "run/report.html").exists()
    code, out, _ = preplay("report", tmp_path / "run", "-q")
    assert code == 0 and (tmp_path / "run/report.html").stat().st_size < 2_000_000
    code, _, err = preplay("run", study_file, "-o", tmp_path / "run")
    assert code == 2 and "--force" in one_line(err)


MISTAKES = {
    "missing file": (("ingest", "nothing.jsonl"), "nothing.jsonl: no such file"),
    "empty file": (("ingest", "empty.jsonl"), "empty.jsonl: empty file"),
    "truncated gz": (("ingest", "cut.gz"), "cut.gz: truncated gzip file: it ends in the middle; copy it again"),
    "wrong header": (("ingest", "header.csv"), "header.csv:1: not a log that Preplay knows"),
    "half a line": (("ingest", "half.jsonl"), "half.jsonl:2: 1 of 2 rows rejected (50.00%"),
    "negative length": (("ingest", "negative.jsonl"), "input_length: prompt length is not at least 1 token"),
    "absent length": (("ingest", "absent.jsonl"), "input_length: the field is missing"),
    "out of order": (("ingest", "order.jsonl"), "order.jsonl:2: timestamps out of order"),
    "unknown key": (
        ("run", "key.toml"),
        "key.toml:baseline.fleet.replicsa: unknown key 'replicsa'; did you mean 'replicas'?",
    ),
    "does not fit": (("run", "fit.toml"), "fit.toml:baseline: llama-3.1-70b (bf16) does not fit 1 x h100-sxm"),
    "no trace": (("reuse", "nothing"), "nothing: no such trace; make one with `preplay ingest LOG`"),
    "a log as a trace": (
        ("reuse", "half.jsonl"),
        "half.jsonl: not a trace folder; make a trace of it first: preplay ingest half.jsonl",
    ),
    "no run": (("report", "nothing"), "nothing: not a run folder"),
    "no study": (("run", "nothing.toml"), "nothing.toml: no such file"),
    "no toml": (("run", "half.jsonl"), "half.jsonl: not valid TOML"),
}


@pytest.fixture
def mistakes(tmp_path, small_trace):
    good = '{"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    files = {
        "empty.jsonl": b"",
        "cut.gz": CONVERSATION.read_bytes()[:4000],
        "header.csv": b"TIMESTAMP,Context,Generated\n",
        "half.jsonl": (good + good[:30]).encode(),
        "negative.jsonl": (good + good.replace("600", "-600")).encode(),
        "absent.jsonl": (good + good.replace('"input_length": 600, ', "")).encode(),
        "order.jsonl": (good + good.replace("5,", "4,", 1)).encode(),
        "key.toml": STUDY.format(name="x", trace=small_trace).replace("replicas =", "replicsa =").encode(),
        "fit.toml": STUDY.format(name="x", trace=small_trace)
        .replace("tensor_parallel = 4", "tensor_parallel = 1")
        .encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_one_line_and_exit_code_2(name, mistakes):
    arguments, message = MISTAKES[name]
    before = {path.name for path in mistakes.iterdir()}
    code, out, err = preplay(*arguments, cwd=mistakes)
    assert code == 2
    assert message in one_line(err)
    assert out == ""
    left = {path.name for path in mistakes.iterdir()} - before
    assert left <= {path for path in left if path.endswith(".rejected.parquet")}, "nothing half-written is left"


def test_usage_errors_exit_with_2():
    code, _, err = preplay("ingest")
    assert code == 2 and "Missing argument" in err
    assert preplay("nonsense")[0] == 2


def test_control_characters_in_errors_are_visible(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\x1b[31mred\n")
    code, _, err = preplay("ingest", log)
    assert code == 2 and "\x1b" not in err


def test_a_wrong_option_prints_nothing_on_stdout(conversation):
    for arguments in (("-c", "-5"), ("--model", "llama"), ("--ttl", "-1")):
        code, out, err = preplay("reuse", conversation, *arguments)
        assert code == 2 and out == "" and one_line(err)


def test_reuse_bounds_and_lifetimes(conversation, expected):
    truth = expected["conversation_trace.jsonl"]
    (row,) = json.loads(preplay("reuse", conversation, "-c", 1000, "--bound", "-f", "json")[1])
    assert row["optimal_hit_blocks"] == truth["optimal_hit_blocks"]["1000"]
    (row,) = json.loads(preplay("reuse", conversation, "--summary", "-f", "json")[1])
    assert row["reusable_tokens"] == truth["infinite"]["hit_tokens_vllm"]
    assert row["smallest_capacity_at_ceiling_blocks"] == truth["smallest_capacity_reaching_infinite"]
    (row,) = json.loads(preplay("reuse", conversation, "--ttl", 300, "-f", "json")[1])
    assert row["refreshed_hit_blocks"] == truth["ttl_ms_refresh"]["300000"]["hit_blocks"]
    assert row["from_write_hit_blocks"] == truth["ttl_ms_no_refresh"]["300000"]["hit_blocks"]


def test_readers_that_stop_reading(conversation, run_folder):
    """`preplay ... | head`: not an error; and talk that nobody hears doesn't stop the work."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipeline.cli", "query", str(run_folder), "SELECT * FROM outcomes", "-f", "csv"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_equal_column_names_are_kept_apart(run_folder):
    assert json.loads(preplay("query", run_folder, "SELECT 1 AS a, 2 AS a", "-f", "json")[1]) == [{"a": 1, "a_2": 2}]
