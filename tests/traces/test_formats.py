"""Each format: what it keeps, what it rejects and why, and that its two paths agree."""

from __future__ import annotations

import csv
import gzip
import json
import random

import numpy as np
import pytest

from tests.conftest import AZURE, CONVERSATION
from traces import azure_2023, mooncake
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
        (GOOD.encode().replace(b"27482", b"NaN"), None, "not a whole JSON object"),
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


def test_named_formats():
    assert format_named("mooncake").name == "mooncake"
