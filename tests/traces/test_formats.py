"""Each format: what it keeps, what it rejects and why, and that its two paths agree."""

from __future__ import annotations

import csv
import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import AZURE, CONVERSATION, SAMPLES
from traces import azure_2023, mooncake, registry
from traces.registry import detect_format, format_named, formats

GOOD = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}'


def line(**changes):
    entry = {**json.loads(GOOD), **changes}
    return json.dumps({key: value for key, value in entry.items() if value != "drop"}).encode()


def only_rejected(format_, text):
    batch = format_.parse(text, 1)
    assert batch.lines.size == 0
    (rejected,) = batch.rejected
    return rejected


def test_registry_finds_every_module():
    assert list(formats()) == ["azure-2023", "mooncake"]


def test_detection_and_its_evidence():
    known, evidence = detect_format(GOOD.encode(), "x")
    assert known.name == "mooncake" and "milliseconds" in evidence
    known, evidence = detect_format(b"TIMESTAMP,ContextTokens,GeneratedTokens", "x")
    assert known.name == "azure-2023" and "UTC" in evidence


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        (GOOD.encode()[:40], None, "not a whole JSON object"),
        (b"[1, 2]", None, "not a whole JSON object"),
        (b'{"timestamp": 1, \xff}', None, "not UTF-8"),
        (line(input_length="drop"), "input_length", "the field is missing"),
        (line(output_length=None), "output_length", "the field is missing"),
        (line(input_length=-5), "input_length", "prompt length is not at least 1 token"),
        (line(output_length=0), "output_length", "output length is not at least 1 token"),
        (line(input_length=2**31), "input_length", "prompt length is absurd"),
        (line(input_length="6955"), "input_length", "not a whole number"),
        (line(input_length=6955.5), "input_length", "not a whole number"),
        (line(input_length=True), "input_length", "not a whole number"),
        (line(timestamp="27482"), "timestamp", "not a number"),
        (line(timestamp=-1), "timestamp", "outside"),
        (GOOD.encode().replace(b"27482", b"NaN"), "timestamp", "not a number"),
        (GOOD.encode().replace(b"27482", b"-Infinity"), "timestamp", "outside"),
        (GOOD.encode().replace(b"27482", b'"\\ud800"'), "timestamp", "not a number"),
        (GOOD.encode().replace(b"6955", b"9" * 5000), "input_length", "prompt length is absurd"),
        (GOOD.encode().replace(b"6955", b"-" + b"9" * 5000), "input_length", "not at least 1 token"),
        (GOOD.encode().replace(b"[46", b"[" * 5000 + b"46"), None, "nested too deep to read"),
        (b"\xef\xbb\xbf" + GOOD.encode(), None, "not a whole JSON object"),
        (line(hash_ids=[1, 2]), "hash_ids", "number of ids does not fit"),
        (line(hash_ids="x"), "hash_ids", "not a list of whole numbers"),
        (line(hash_ids=[2**70] * 14), "hash_ids", "does not fit 64 bits"),
        (
            GOOD.encode().replace(b'"output_length": 52', b'"output_length": 52, "output_length": 53'),
            "output_length",
            "twice",
        ),
        (GOOD.encode() + GOOD.encode(), None, "not a whole JSON object"),
    ],
)
def test_mooncake_rejects(text, column, reason):
    rejected = only_rejected(mooncake.Mooncake(), text)
    assert rejected.line == 1
    assert rejected.column == column
    assert reason in rejected.reason
    assert len(rejected.text.encode()) <= 4 * 200, "short, and valid UTF-8"


def test_mooncake_keeps_what_is_usable():
    text = line(extra={"a": 1}) + b"\n\n" + line(timestamp=27482.5, hash_ids=list(range(13))) + b"\r\n" + line()
    batch = mooncake.Mooncake().parse(text, 10)
    assert batch.lines.tolist() == [10, 12, 13]
    assert batch.arrival_us.tolist() == [27_482_000, 27_482_500, 27_482_000]
    assert np.diff(batch.block_offsets).tolist() == [14, 13, 14]
    assert batch.rejected == []


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        (b"2023-11-16 18:15:46.6805900,374", None, "not 3 fields"),
        (b"2023-11-16 18:15:46.6805900,374,44,", None, "not 3 fields"),
        (b"2023-11-16T18:15:46,374,44", "TIMESTAMP", "not a timestamp"),
        (b"2023-02-30 18:15:46,374,44", "TIMESTAMP", "not a timestamp"),
        (b"2023-11-16 25:15:46,374,44", "TIMESTAMP", "not a timestamp"),
        (b"2023-11-16 18:15:46,,44", "ContextTokens", "missing"),
        (b"2023-11-16 18:15:46,3 74,44", "ContextTokens", "not a whole number"),
        (b"2023-11-16 18:15:46,374.0,44", "ContextTokens", "not a whole number"),
        (b"2023-11-16 18:15:46,-374,44", "ContextTokens", "not at least 1 token"),
        (b"2023-11-16 18:15:46,374,0", "GeneratedTokens", "not at least 1 token"),
        (b"2023-11-16 18:15:46,374,99999999999", "GeneratedTokens", "absurd"),
        (b"2023-11-16 18:15:46,374," + b"9" * 5000, "GeneratedTokens", "absurd"),
        (b"2023-11-16 18:15:46,374,-" + b"9" * 5000, "GeneratedTokens", "not at least 1 token"),
        (b"2023-11-16 18:15:60,374,44", "TIMESTAMP", "not a timestamp"),
        (b"0000-11-16 18:15:46,374,44", "TIMESTAMP", "not a timestamp"),
        (b"2023-11-16 18:15:46,0374,44", "ContextTokens", "zeros in front"),
        ("2023-11-16 18:15:46,３７４,44".encode(), None, "not plain ASCII"),
        (b'2023-11-16 18:15:46,"374",44', "ContextTokens", "not a whole number"),
    ],
)
def test_azure_rejects(text, column, reason):
    rejected = only_rejected(azure_2023.Azure2023(), text)
    assert (rejected.line, rejected.column) == (1, column)
    assert reason in rejected.reason


def test_azure_equals_the_csv_module():
    body = AZURE.read_bytes().split(b"\n", 1)[1]
    batch = azure_2023.Azure2023().parse(body, 2)
    with AZURE.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert batch.input_tokens.tolist() == [int(row["ContextTokens"]) for row in rows]
    assert batch.output_tokens.tolist() == [int(row["GeneratedTokens"]) for row in rows]
    first = np.datetime64("2023-11-16T18:15:46.680590", "us").astype(int)
    assert batch.arrival_us[0] == first
    assert batch.lines.tolist() == list(range(2, 502))


def same(left, right):
    assert left.lines.tolist() == right.lines.tolist()
    assert left.arrival_us.tolist() == right.arrival_us.tolist()
    assert left.input_tokens.tolist() == right.input_tokens.tolist()
    assert left.output_tokens.tolist() == right.output_tokens.tolist()
    assert left.rejected == right.rejected
    if left.raw_blocks is not None:
        assert left.raw_blocks.tolist() == right.raw_blocks.tolist()
        assert left.block_offsets.tolist() == right.block_offsets.tolist()


def sample_lines(name):
    if name == "mooncake":
        with gzip.open(CONVERSATION) as stream:
            return [line for line, _ in zip(stream, range(30), strict=False)]
    return AZURE.read_bytes().splitlines(keepends=True)[1:31]


@pytest.mark.parametrize("name", ["mooncake", "azure-2023"])
def test_fast_and_careful_path_agree_on_mutated_files(name):
    """Cut, flip, duplicate, reorder bytes and lines: whatever the fast path accepts, the careful one reads the same way."""
    module = {"mooncake": mooncake, "azure-2023": azure_2023}[name]
    clean = sample_lines(name)
    accepted = 0
    for seed in range(1500):
        chance = random.Random(seed)
        lines = list(clean[: chance.randint(1, 30)])
        for _ in range(chance.randint(0, 2)):
            place = chance.randrange(len(lines))
            text = bytearray(lines[place])
            kind = chance.choice(["flip", "cut", "insert", "double", "swap", "blank"])
            if kind == "flip" and text:
                text[chance.randrange(len(text))] = chance.choice(b'0123456789 "{}[],.:-eN\t\n\r\x00\xff')
            elif kind == "cut":
                del text[chance.randrange(len(text) + 1) :]
            elif kind == "insert":
                text[chance.randrange(len(text) + 1) : 0] = chance.choice(
                    [b" ", b"0", b",", b"\n", b"-", b"1e3", b".0", b"null"]
                )
            elif kind == "double":
                lines.insert(place, bytes(text))
            elif kind == "swap":
                lines.reverse()
            elif kind == "blank":
                text = bytearray(b"  \n")
            lines[place] = bytes(text)
        chunk = b"".join(lines)
        if not chunk.strip():
            continue
        fast = module._parse_clean(chunk, 5)
        careful = module._parse_careful(chunk, 5)
        if fast is not None:
            accepted += 1
            same(fast, careful)
        rows = sum(bool(line.strip()) for line in chunk.split(b"\n"))
        assert careful.lines.size + len(careful.rejected) == rows, seed
    assert 300 < accepted < 1500


IGNORED = [
    b"NaN", b"-NaN", b"Inf", b"-Infinity", b"1e400", b"01", b"1.", b"9" * 5000, b"[" * 3000 + b"]" * 3000,
    b'{"timestamp": 1, "timestamp": 2}', b'1, "extra": 2', b'"NaN, Inf"', b'"\\ud800"', b'"a\tb"', b'"\xc3\xa9"', b'"\xff"',
    b'1, "timestamp": 3', b'1, "input\\u005flength": 3', b'{}', b'{"a": [{}, {}]}', b"{}\n{}", b"null", b"",
]  # fmt: skip
AROUND = [b"", b" ", b"\t", b"\r", b"\x0c", b"\xef\xbb\xbf", b"\n", b"{}"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(AROUND), st.sampled_from(IGNORED), st.sampled_from(AROUND)), max_size=2))
def test_paths_agree_whatever_a_foreign_field_holds(odd):
    """Where the fast path accepts a chunk with odd lines, the careful one reads them alike; if it refuses, all is told."""
    lines = [before + GOOD.encode()[:-1] + b', "extra": ' + value + b"}" + after for before, value, after in odd]
    chunk = b"\n".join([GOOD.encode(), *lines, GOOD.encode()])
    fast, careful = mooncake._parse_clean(chunk, 5), mooncake._parse_careful(chunk, 5)
    if fast is not None:
        same(fast, careful)
    assert careful.lines.size + len(careful.rejected) == sum(bool(each.strip()) for each in chunk.split(b"\n"))


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"9" * 5000, b"[" * 3000 + b"]" * 3000, b'"\\ud800"', b'1, "extra": 2',
                                   b'{"timestamp": 1, "timestamp": 2}'])  # fmt: skip
def test_foreign_fields_are_ignored_whatever_they_hold(value):
    chunk = GOOD.encode()[:-1] + b', "extra": ' + value + b"}"
    careful = mooncake._parse_careful(chunk, 3)
    assert careful.rejected == []
    same(careful, mooncake._parse_careful(GOOD.encode(), 3))
    same(mooncake._parse_clean(chunk, 3) or careful, careful)


TIMES = ["2023-11-16 18:15:46", "2024-02-29 00:00:00", "2023-02-29 00:00:00", "1000-01-01 23:59:59", "0999-01-01 00:00:00",
         "2999-12-31 23:59:60", "1969-12-31 23:59:59", "2023-11-16 24:00:00", "2023-13-01 00:00:00"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(TIMES),
    st.sampled_from(["", ".", ".5", ".680590", ".6805999", ".123456789", ".1234567890", "Z"]),
    st.sampled_from(["1", "999999999", "1000000000", "0", "-1", "+1", "07", "1 ", "", '"1"', "1e3"]),
)
def test_azure_paths_agree_on_every_kind_of_time_and_length(time, fraction, length):
    chunk = f"{time}{fraction},{length},44\r\n2023-11-16 18:15:46,374,44".encode()
    fast, careful = azure_2023._parse_clean(chunk, 2), azure_2023._parse_careful(chunk, 2)
    assert (fast is None) == bool(careful.rejected), "the fast path refuses exactly what has a fault"
    if fast is not None:
        same(fast, careful)


@pytest.mark.parametrize("name", ["mooncake", "azure-2023"])
def test_one_bad_row_leaves_the_fast_path_to_the_others(name, monkeypatch):
    """A chunk of many pieces, some with faults: as line by line, but only the pieces at fault are read so."""
    module = {"mooncake": mooncake, "azure-2023": azure_2023}[name]
    lines = (SAMPLES / "mooncake_synthetic_head.jsonl").read_bytes().splitlines(keepends=True)
    if name != "mooncake":
        lines = AZURE.read_bytes().splitlines(keepends=True)[1:301]
    lines[100] = b"nonsense\n"
    lines[222] = b"\n"
    chunk = b"".join(lines)
    monkeypatch.setattr(registry, "PIECE_BYTES", 1000)
    slow_lines = []

    def careful(piece, first_line):
        slow_lines.extend(range(first_line, first_line + piece.count(b"\n")))
        return module._parse_careful(piece, first_line)

    batch = registry.parse_in_pieces(chunk, 7, module._parse_clean, careful)
    same(batch, module._parse_careful(chunk, 7))
    same(batch, format_named(name).parse(chunk, 7))
    assert [row.line for row in batch.rejected] == [107]
    assert batch.lines.size == 298
    assert 107 in slow_lines and len(slow_lines) < 120


def test_named_formats():
    assert format_named("mooncake").name == "mooncake"
