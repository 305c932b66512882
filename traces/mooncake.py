"""Mooncake's open traces: JSON lines, one request each, prompts as chained block hashes.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0), described in "Mooncake: Trading More Storage for
Less Computation", FAST 2025.

| field | type | meaning |
| --- | --- | --- |
| timestamp | number | arrival, milliseconds from the start of the trace |
| input_length | integer | prompt tokens |
| output_length | integer | generated tokens |
| hash_ids | list of integers | one per block of 512 prompt tokens, chained: equal ids mean equal whole prefixes; the last one may stand for a partial block, so there are `input_length / 512` of them, rounded up or down |

Other fields are ignored.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from schemas.trace import PrefixIdentity
from traces.lines import numbered_lines
from traces.registry import MAX_TOKENS, Batch, Rejected, register

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_TIMESTAMP_MS = 1e13
_SCHEMA = pa.schema(
    [
        pa.field("timestamp", pa.float64()),
        pa.field("input_length", pa.int64()),
        pa.field("output_length", pa.int64()),
        pa.field("hash_ids", pa.list_(pa.int64())),
    ]
)
_TWO_ON_A_LINE = re.compile(rb"\}[ \t\r]*\{")
_BLANK_LINE = re.compile(rb"(?:\A|\n)[ \t\r]*\n")


class Mooncake:
    """See the module's docstring."""

    name = "mooncake"
    title = "Mooncake trace (JSON lines with timestamp, input_length, output_length, hash_ids)"
    has_header = False
    wall_clock = False
    block_tokens: int | None = BLOCK_TOKENS
    prefix_identity: PrefixIdentity = "known"

    def detect(self, first_line: bytes) -> str | None:
        """JSON lines with the four fields."""
        if first_line.startswith(b"{") and all(b'"%s"' % name.encode() in first_line for name in _FIELDS):
            return (
                f"mooncake: the first line is a JSON object with {', '.join(_FIELDS)}; timestamps read as milliseconds"
            )
        return None

    def header_fault(self, header: bytes) -> str | None:
        """There is no header."""
        del header
        return None

    def parse(self, chunk: bytes, first_line: int) -> Batch:
        """All rows at once where every one of them is in order, else line by line."""
        return _parse_clean(chunk, first_line) or _parse_careful(chunk, first_line)


def _parse_clean(chunk: bytes, first_line: int) -> Batch | None:
    """The whole chunk by Arrow's JSON reader, or None where anything at all is unusual."""
    if _BLANK_LINE.search(chunk) or _TWO_ON_A_LINE.search(chunk) or b"\0" in chunk:
        return None
    try:
        chunk.decode("utf-8")
        table = pyarrow.json.read_json(
            pa.BufferReader(chunk),
            read_options=pyarrow.json.ReadOptions(block_size=max(len(chunk), 1)),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        ).combine_chunks()
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
    if table.num_rows != lines or any(table[name].null_count for name in _FIELDS):
        return None
    blocks = table["hash_ids"].combine_chunks()
    flat = blocks.flatten()
    if flat.null_count:
        return None
    timestamp = table["timestamp"].to_numpy()
    length, output = table["input_length"].to_numpy(), table["output_length"].to_numpy()
    counts = pc.list_value_length(blocks).to_numpy().astype(np.int64)
    fine = (
        (timestamp >= 0) & (timestamp <= _MAX_TIMESTAMP_MS)
        & (length >= 1) & (length <= MAX_TOKENS) & (output >= 1) & (output <= MAX_TOKENS)
        & ((counts == length // BLOCK_TOKENS) | (counts == -(-length // BLOCK_TOKENS)))
    )  # fmt: skip
    if not fine.all():
        return None
    return Batch(
        lines=np.arange(first_line, first_line + lines, dtype=np.int64),
        arrival_us=np.rint(timestamp * 1000).astype(np.int64),
        input_tokens=length.astype(np.int32),
        output_tokens=output.astype(np.int32),
        block_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        raw_blocks=flat.to_numpy(),
        rejected=[],
    )


def _parse_careful(chunk: bytes, first_line: int) -> Batch:
    """Line by line, naming each fault."""
    rows: list[tuple[int, int, int, int, list[int]]] = []
    rejected: list[Rejected] = []
    for number, line in numbered_lines(chunk, first_line):
        row = _row(number, line)
        if isinstance(row, Rejected):
            rejected.append(row)
        else:
            rows.append(row)
    lines, arrival, length, output, blocks = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return Batch(
        lines=np.array(lines, np.int64),
        arrival_us=np.array(arrival, np.int64),
        input_tokens=np.array(length, np.int32),
        output_tokens=np.array(output, np.int32),
        block_offsets=np.concatenate([[0], np.cumsum([len(each) for each in blocks])]).astype(np.int64),
        raw_blocks=np.array([each for ids in blocks for each in ids], np.int64),
        rejected=rejected,
    )


class _Duplicate(ValueError):
    """A key stands twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Duplicate(next(name for name in names if names.count(name) > 1))
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _row(number: int, line: bytes) -> tuple[int, int, int, int, list[int]] | Rejected:
    """One line as (line, arrival us, input, output, ids), or what is wrong with it."""
    text = line.decode("utf-8", "backslashreplace")

    def no(column: str | None, shown: Any, reason: str) -> Rejected:
        return Rejected(number, column, str(shown)[:200], reason)

    try:
        entry = json.loads(line.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError:
        return no(None, text, "not UTF-8")
    except _Duplicate as problem:
        return no(str(problem)[:100], text, "the field stands there twice")
    except (ValueError, RecursionError):
        return no(None, text, "not a whole JSON object")
    if not isinstance(entry, dict):
        return no(None, text, "not a whole JSON object")
    for name in _FIELDS:
        if entry.get(name) is None:
            return no(name, text, "the field is missing")
    timestamp = entry["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        return no("timestamp", timestamp, "not a number")
    if not 0 <= timestamp <= _MAX_TIMESTAMP_MS:
        return no("timestamp", timestamp, "outside 0 to 1e13 ms")
    for name, what in (("input_length", "prompt"), ("output_length", "output")):
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int):
            return no(name, value, "not a whole number")
        if not 1 <= value <= MAX_TOKENS:
            return no(
                name, value, f"{what} length is not at least 1 token" if value < 1 else f"{what} length is absurd"
            )
    ids, length = entry["hash_ids"], entry["input_length"]
    if not isinstance(ids, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        return no("hash_ids", ids, "not a list of whole numbers")
    if any(not -(2**63) <= each < 2**63 for each in ids):
        return no("hash_ids", ids, "an id does not fit 64 bits")
    if len(ids) not in (length // BLOCK_TOKENS, -(-length // BLOCK_TOKENS)):
        return no("hash_ids", len(ids), f"number of ids does not fit input_length in blocks of {BLOCK_TOKENS} tokens")
    return number, round(timestamp * 1000), length, entry["output_length"], ids


register(Mooncake())
