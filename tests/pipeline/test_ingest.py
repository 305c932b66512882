"""Ingest: the published figures, every kind of bad file, and that nothing is lost or left behind."""

from __future__ import annotations

import gzip
import hashlib
import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.ingest import ingest
from pipeline.trace import read_trace
from schemas.errors import InputError, RunError, TooManyRejected
from schemas.trace import REJECTED_SCHEMA, TRACE_SCHEMA
from tests.conftest import AZURE, CONVERSATION, SYNTHETIC

ROW = '{{"timestamp": {at}, "input_length": {n}, "output_length": 5, "hash_ids": {ids}}}\n'


def row(at, n=600, ids=(0, 1)):
    return ROW.format(at=at, n=n, ids=list(ids))


def nothing_left(folder, *besides):
    return sorted(path.name for path in folder.iterdir()) == sorted(besides)


@pytest.mark.parametrize(
    ("log", "rows", "tokens_in", "tokens_out", "span_s", "arrivals"),
    [
        (CONVERSATION, 12_031, 144_793_823, 4_122_048, 3537, 1180),
        (SYNTHETIC, 3_993, 61_194_628, 595_432, 1022, 3982),
    ],
)
def test_published_figures(log, rows, tokens_in, tokens_out, span_s, arrivals, tmp_path, expected):
    report = ingest([log], tmp_path / "t")
    assert (report.rows_read, report.rows_kept, report.rows_rejected) == (rows, rows, 0)
    assert (report.input_tokens, report.output_tokens) == (tokens_in, tokens_out)
    assert round(report.span_s) == span_s
    assert report.distinct_arrivals == arrivals
    truth = expected[log.name.removeprefix("mooncake_").removesuffix(".gz")]
    assert report.distinct_blocks == truth["distinct_blocks"]
    assert report.sources[0].sha256 == hashlib.sha256(log.read_bytes()).hexdigest()
    table = pq.read_table(tmp_path / "t/trace.parquet")
    assert table.schema.equals(TRACE_SCHEMA)
    assert table.num_rows == rows
    assert pq.read_table(tmp_path / "t/rejected.parquet").schema.equals(REJECTED_SCHEMA)
    first = table["prefix_blocks"][0].as_py()
    assert first == list(range(len(first))), "dense ids in order of first sight"


def test_azure_has_no_identity(azure):
    trace = read_trace(azure)
    assert trace.meta.prefix_identity == "unknown"
    assert trace.meta.block_tokens is None
    assert trace.meta.start_utc == "2023-11-16T18:15:46.680590+00:00"
    assert not trace.has_identity.any()
    assert trace.report.distinct_blocks is None
    assert trace.arrival_us[:2].tolist() == [0, 4_314_579]


def test_same_log_same_bytes(tmp_path):
    for name in ("a", "b"):
        ingest([SYNTHETIC], tmp_path / name)
    for file in ("trace.parquet", "identities.parquet", "rejected.parquet", "ingest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_chunks_of_any_size_give_the_same_trace(tmp_path, monkeypatch):
    ingest([SYNTHETIC], tmp_path / "whole")
    monkeypatch.setattr("traces.lines.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("traces.lines._READ_BYTES", 777)
    ingest([SYNTHETIC], tmp_path / "pieces")
    assert pq.read_table(tmp_path / "whole/trace.parquet").equals(pq.read_table(tmp_path / "pieces/trace.parquet"))


def test_rejected_rows_are_accounted_for(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(row(at) for at in range(298)) + row(299, n=-1) + row(299)[:30] + "\n")
    report = ingest([log], tmp_path / "t")
    assert (report.rows_read, report.rows_kept, report.rows_rejected) == (300, 298, 2)
    assert {each.reason: each.first_line for each in report.rejected_by_reason} == {
        "input_length: prompt length is not at least 1 token": 299,
        "not a whole JSON object": 300,
    }
    rejected = pq.read_table(tmp_path / "t/rejected.parquet").to_pylist()
    assert [(each["line"], each["column"]) for each in rejected] == [(299, "input_length"), (300, None)]
    assert rejected[1]["text"] == row(299)[:30]


def test_too_many_rejected_rows_stop_it(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(row(at) for at in range(90)) + "nonsense\n" * 10)
    log.write_text(log.read_text())
    with pytest.raises(TooManyRejected) as caught:
        ingest([log], tmp_path / "t", format="mooncake")
    text = caught.value.line()
    assert text.startswith(
        f"{log}:91: 10 of 100 rows rejected (10.00%, allowed 1.00%); most often: not a whole JSON object (10x)"
    )
    assert "--max-rejected" in text
    assert nothing_left(tmp_path, "log.jsonl", "t.rejected.parquet")
    assert pq.read_table(tmp_path / "t.rejected.parquet").num_rows == 10
    assert ingest([log], tmp_path / "t", max_rejected=0.1).rows_rejected == 10


BAD_FILES = {
    "empty.jsonl": (b"", r"empty\.jsonl: empty file"),
    "blank.jsonl": (b"\n  \n", "empty file"),
    "cut.jsonl.gz": (CONVERSATION.read_bytes()[:5000], r"cut\.jsonl\.gz: truncated gzip file"),
    "damaged.jsonl.gz": (
        CONVERSATION.read_bytes()[:3000] + b"\0" * 500 + CONVERSATION.read_bytes()[3500:],
        "damaged gzip file",
    ),
    "header.csv": (
        b"TIMESTAMP,Context,Generated\n2023-11-16 18:15:46,1,1\n",
        r"header\.csv:1: not a log that Preplay knows",
    ),
    "only_header.csv": (b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n", "no requests in it, only a header"),
    "binary.bin": (bytes(range(256)) * 10, "not a log that Preplay knows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name, tmp_path):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        ingest([tmp_path / name], tmp_path / "t")
    assert "\n" not in caught.value.line()
    assert nothing_left(tmp_path, name)


def test_missing_files_folders_and_wrong_names(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        ingest([tmp_path / "nothing.jsonl"], tmp_path / "t")
    with pytest.raises(InputError, match="is a folder"):
        ingest([tmp_path], tmp_path / "t")
    with pytest.raises(InputError, match="unknown log format 'azure'; known: azure-2023, mooncake"):
        ingest([AZURE], tmp_path / "t", format="azure")
    with pytest.raises(InputError, match="the header is"):
        ingest([SYNTHETIC], tmp_path / "t", format="azure-2023")
    with pytest.raises(InputError, match=r"is azure-2023, the logs before it are mooncake"):
        ingest([SYNTHETIC, AZURE], tmp_path / "t")
    assert nothing_left(tmp_path)


def test_timestamps_out_of_order(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(row(5000) + row(2000, 700) + row(9000) + row(8999, 800) + row(2000, 900))
    with pytest.raises(
        InputError, match=r"log\.jsonl:2: timestamps out of order: 3 s before .*\(2000 ms after 5000 ms\); .*--sort"
    ):
        ingest([log], tmp_path / "t")
    assert nothing_left(tmp_path, "log.jsonl")
    report = ingest([log], tmp_path / "t", sort=True)
    assert (report.rows_reordered, report.distinct_arrivals, report.span_s) == (3, 4, 7.0)
    trace = read_trace(tmp_path / "t")
    assert trace.arrival_us.tolist() == [0, 0, 3_000_000, 6_999_000, 7_000_000]
    assert trace.input_tokens.tolist() == [700, 900, 600, 800, 600], "ties in the order of the file"
    assert trace.table["request_id"].to_pylist() == ["1:2", "1:5", "1:1", "1:4", "1:3"]
    assert trace.table["status"].to_pylist() == ["completed"] * 5


def test_sorting_a_sorted_log_changes_nothing(tmp_path):
    ingest([SYNTHETIC], tmp_path / "plain")
    ingest([SYNTHETIC], tmp_path / "sorted", sort=True)
    assert pq.read_table(tmp_path / "plain/trace.parquet").equals(pq.read_table(tmp_path / "sorted/trace.parquet"))
    plain, ordered = read_trace(tmp_path / "plain").meta, read_trace(tmp_path / "sorted").meta
    assert ordered.ingest_options == ("--sort",)
    assert plain == ordered.model_copy(update={"ingest_options": ()})


def test_several_files_bom_crlf_and_members(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_bytes(b"\xef\xbb\xbf" + row(0).replace("\n", "\r\n").encode() + row(10).strip().encode())
    second.write_bytes(gzip.compress(row(20).encode()) + gzip.compress((row(30, ids=(7, 8)) + "\n").encode()))
    report = ingest([first, second], tmp_path / "t")
    assert report.rows_kept == 4
    trace = read_trace(tmp_path / "t")
    assert trace.table["request_id"].to_pylist() == ["1:1", "1:2", "2:1", "2:2"]
    assert trace.arrival_us.tolist() == [0, 10_000, 20_000, 30_000]
    assert trace.block_ids.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]


def test_the_output_folder_is_not_overwritten(tmp_path):
    ingest([AZURE], tmp_path / "t")
    before = (tmp_path / "t/trace.parquet").read_bytes()
    with pytest.raises(RunError, match="is there already"):
        ingest([SYNTHETIC], tmp_path / "t")
    assert (tmp_path / "t/trace.parquet").read_bytes() == before
    ingest([SYNTHETIC], tmp_path / "t", force=True)
    assert read_trace(tmp_path / "t").meta.source_format == "mooncake"
    assert nothing_left(tmp_path, "t")


def test_force_replaces_nothing_but_a_trace(tmp_path):
    """Neither somebody's documents, nor the folder that the log lies in, nor a file, nor what a link points to."""
    log = tmp_path / "logs/log.jsonl"
    log.parent.mkdir()
    log.write_text(row(0))
    file, link, empty = tmp_path / "file", tmp_path / "link", tmp_path / "empty"
    file.write_text("mine")
    link.symlink_to(log.parent)
    empty.mkdir()
    with pytest.raises(RunError, match=r"logs: holds something else \('log.jsonl'\)"):
        ingest([log], log.parent, force=True)
    for out in (file, link):
        with pytest.raises(RunError, match="is no folder"):
            ingest([log], out, force=True)
    assert nothing_left(tmp_path, "logs", "file", "link", "empty")
    assert file.read_text() == "mine" and log.read_text() == row(0)
    assert ingest([log], empty, force=True).rows_kept == 1


def test_rows_that_no_encoding_or_number_holds_are_rejected_rows(tmp_path):
    """Lone surrogates, numbers of thousands of digits: faults of a row, never a traceback."""
    log = tmp_path / "log.jsonl"
    odd = [row('"\\ud800"'), row(7, n="9" * 5000), row(8).replace("[0, 1]", f"[0, {'9' * 5000}]")]
    log.write_text("".join(row(at) for at in range(5)) + "".join(odd))
    report = ingest([log], tmp_path / "t", max_rejected=0.5)
    assert (report.rows_kept, report.rows_rejected) == (5, 3)
    rejected = pq.read_table(tmp_path / "t/rejected.parquet").to_pylist()
    assert [each["column"] for each in rejected] == ["timestamp", "input_length", "hash_ids"]
    assert rejected[0]["text"] == "\\ud800"
    assert rejected[1]["text"] == "9" * 200


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none(share, tmp_path):
    with pytest.raises(InputError, match="not a share from 0 to 1"):
        ingest([AZURE], tmp_path / "t", max_rejected=share)
    assert nothing_left(tmp_path)


def test_progress_and_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("traces.lines.CHUNK_BYTES", 100_000)
    monkeypatch.setattr("traces.lines._READ_BYTES", 777)
    monkeypatch.setattr("pipeline.ingest.ROW_GROUP_ROWS", 100)
    seen = []
    ingest([SYNTHETIC, SYNTHETIC], tmp_path / "t", sort=True, progress=lambda log, rows: seen.append((log, rows)))
    assert seen[-1] == (SYNTHETIC, 2 * 3_993)
    assert [rows for _, rows in seen] == sorted({rows for _, rows in seen}) and len(seen) > 4
    monkeypatch.setattr("traces.lines.CHUNK_BYTES", 10**7)
    ingest([SYNTHETIC], tmp_path / "u")
    groups = pq.ParquetFile(tmp_path / "u/trace.parquet").metadata
    assert max(groups.row_group(each).num_rows for each in range(groups.num_row_groups)) == 100


def test_a_failed_force_keeps_the_old_folder(tmp_path):
    ingest([AZURE], tmp_path / "t")
    (tmp_path / "bad.jsonl").write_text(row(0) + "x\n" * 50)
    with pytest.raises(TooManyRejected):
        ingest([tmp_path / "bad.jsonl"], tmp_path / "t", force=True)
    assert read_trace(tmp_path / "t").meta.source_format == "azure-2023"


def test_mutated_logs_end_with_a_typed_error_or_reconciled_counts(tmp_path):
    """Random damage anywhere in a file: never a traceback, never a row lost."""
    clean = "".join(row(at, n=600 + at) for at in range(40)).encode()
    for seed in range(150):
        chance = random.Random(seed)
        text = bytearray(clean)
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(len(text))
            action = chance.choice(["flip", "cut", "copy"])
            if action == "flip":
                text[place] = chance.randrange(256)
            elif action == "cut":
                del text[place : place + chance.randint(1, 200)]
            else:
                text[place:place] = text[place : place + chance.randint(1, 200)]
        log = tmp_path / "log.jsonl"
        log.write_bytes(text)
        try:
            report = ingest([log], tmp_path / "t", max_rejected=1.0, sort=True, force=True)
        except InputError:
            continue
        lines = sum(bool(line.strip()) for line in bytes(text).split(b"\n"))
        assert report.rows_read == report.rows_kept + report.rows_rejected == lines
        assert pq.read_table(tmp_path / "t/rejected.parquet").num_rows == report.rows_rejected
        assert pq.read_table(tmp_path / "t/trace.parquet").num_rows == report.rows_kept


def test_traces_that_are_none(tmp_path, conversation):
    with pytest.raises(InputError, match="no such trace"):
        read_trace(tmp_path / "t")
    with pytest.raises(InputError, match="preplay ingest"):
        read_trace(AZURE)
    (tmp_path / "trace.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match="damaged Parquet"):
        read_trace(tmp_path)
    pq.write_table(
        pq.read_table(conversation / "trace.parquet").slice(0, 3).replace_schema_metadata(None),
        tmp_path / "trace.parquet",
    )
    with pytest.raises(InputError, match="not a Preplay trace"):
        read_trace(tmp_path / "trace.parquet")


def test_a_trace_that_breaks_the_contract_is_refused(tmp_path, conversation):
    """Somebody else's Parquet: arrivals out of order, or ids that don't fit the lengths."""
    table = pq.read_table(conversation / "trace.parquet").slice(0, 40)
    meta = pq.read_metadata(conversation / "trace.parquet").metadata
    meta = {key: value for key, value in meta.items() if key.startswith(b"preplay")}

    def write(changed):
        pq.write_table(changed.replace_schema_metadata(meta), tmp_path / "trace.parquet")

    write(table)
    assert read_trace(tmp_path).input_tokens.shape == (40,)
    index = table.column_names.index("arrival_us")
    write(table.set_column(index, TRACE_SCHEMA.field(index), [np.arange(40)[::-1].copy()]))
    with pytest.raises(InputError, match="row 1: arrivals are not in order"):
        read_trace(tmp_path)
    index = table.column_names.index("input_tokens")
    write(table.set_column(index, TRACE_SCHEMA.field(index), [np.full(40, 10**6, np.int32)]))
    with pytest.raises(InputError, match="row 0: prefix_blocks does not fit input_tokens"):
        read_trace(tmp_path)


def test_report_is_json(conversation):
    report = json.loads((conversation / "ingest.json").read_text())
    assert report["rows_read"] == report["rows_kept"] + report["rows_rejected"] == 12_031


def test_gzip_members_with_padding_and_bombs(tmp_path):
    """Zeros between members, more than a read at a time, hide nothing; and a member that unpacks to much is read in pieces."""
    log = tmp_path / "log.jsonl.gz"
    padding = b"\0" * 3_000_000
    log.write_bytes(gzip.compress(row(0).encode()) + padding + gzip.compress(row(1).encode()) + padding)
    report = ingest([log], tmp_path / "t")
    assert report.rows_kept == 2
    assert report.sources[0].sha256 == hashlib.sha256(log.read_bytes()).hexdigest()
    log.write_bytes(gzip.compress(row(0).encode() + b" " * 50_000_000 + b"\n" + row(1).encode()))
    assert ingest([log], tmp_path / "u").rows_kept == 2
    log.write_bytes(gzip.compress(row(0).encode()) + b"trailing")
    with pytest.raises(InputError, match="damaged gzip"):
        ingest([log], tmp_path / "v")


def test_options_are_kept_to_repeat_the_ingest_and_old_rejects_go(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(row(5) + row(3) + "x\n")
    with pytest.raises(TooManyRejected):
        ingest([log], tmp_path / "t", sort=True)
    assert (tmp_path / "t.rejected.parquet").exists()
    ingest([log], tmp_path / "t", sort=True, max_rejected=0.5, format="mooncake")
    assert not (tmp_path / "t.rejected.parquet").exists()
    options = read_trace(tmp_path / "t").meta.ingest_options
    assert options == ("--log-format", "mooncake", "--max-rejected", "0.5", "--sort")
