"""Mooncake's open traces: JSON lines, one request each, prompts as chained block hashes.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0), described in "Mooncake: Trading More Storage for
Less Computation", FAST 2025.

| field | type | meaning |
| --- | --- | --- |
| timestamp | number | arrival, milliseconds from the start of the trace |
| input_length | integer | prompt tokens |
| output_length | integer | generated tokens |
| hash_ids | list of integers | one per block of 512 prompt tokens, chained: equal ids mean equal whole prefixes; the last one may stand for a partial block, so there are `input_length / 512` of them, rounded up or down |

Other fields are ignored, whatever they hold.
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
from traces.registry import MAX_TOKENS, Batch, Rejected, parse_in_pieces, register

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
_CONSTANT = re.compile(rb"[:\[,][ \t]*-?(?:NaN|Inf)")
_LONGEST_INT = 40  # digits


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
        return parse_in_pieces(chunk, first_line, _parse_clean, _parse_careful)


def _parse_clean(chunk: bytes, first_line: int) -> Batch | None:
    """The whole chunk by Arrow's JSON reader, or None where anything at all is unusual."""
    if b"\0" in chunk or not _one_object_a_line(chunk):
        return None
    if (b"NaN" in chunk or b"Inf" in chunk) and _CONSTANT.search(chunk):  # Arrow reads more spellings than Python
        return None
    try:
        if not chunk.isascii():
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


def _one_object_a_line(chunk: bytes) -> bool:
    """Whether every line end stands between a } and a {, none of them blank.

    In JSON nothing but the end of one object and the start of the next looks so. With as many rows as lines, each line
    then holds exactly one.
    """
    body = chunk.removesuffix(b"\n").removesuffix(b"\r")
    ends = body.count(b"\n")
    return body.startswith(b"{") and (
        ends == body.count(b"}\n{") or ends == body.count(b"}\n{") + body.count(b"}\r\n{")
    )


def _parse_careful(chunk: bytes, first_line: int) -> Batch:
    """Line by line, naming each fault."""
    rows: list[_Row] = []
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


class _Object(dict[str, Any]):
    """A JSON object that remembers which of our fields stood in it twice, if any did."""

    twice: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        result.twice = next((name for name in _FIELDS if names.count(name) > 1), None)
    return result


class _Long(int):
    """A number too long for Python to read: compares as a huge one, prints as it stood there."""

    text: str

    def __new__(cls, text: str) -> _Long:
        """`text` as JSON writes whole numbers."""
        short = text if len(text) <= _LONGEST_INT else f"{'-' * text.startswith('-')}1{'0' * _LONGEST_INT}"
        number = super().__new__(cls, short)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:  # a number of thousands of digits, maybe in a field that is none of our business
        return json.loads(text, object_pairs_hook=_object, parse_int=_Long)


_Row = tuple[int, int, int, int, list[int]]


def _row(number: int, line: bytes) -> _Row | Rejected:
    """One line as (line, arrival us, input, output, ids), or what is wrong with it."""
    text = line.decode("utf-8", "backslashreplace")
    try:
        entry = _loaded(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Rejected.of(number, None, text, "not UTF-8")
    except ValueError:
        return Rejected.of(number, None, text, "not a whole JSON object")
    except RecursionError:  # Arrow's reader has no such limit; let it judge
        one = _parse_clean(line, number)
        if one is None or one.raw_blocks is None:
            return Rejected.of(number, None, text, "nested too deep to read")
        return (
            number,
            int(one.arrival_us[0]),
            int(one.input_tokens[0]),
            int(one.output_tokens[0]),
            one.raw_blocks.tolist(),
        )
    if not isinstance(entry, _Object):
        return Rejected.of(number, None, text, "not a whole JSON object")
    return _checked(number, text, entry)


def _checked(number: int, text: str, entry: _Object) -> _Row | Rejected:
    """The fields of an object, each held against its type and range."""

    def no(column: str, shown: object, reason: str) -> Rejected:
        return Rejected.of(number, column, shown, reason)

    if entry.twice is not None:
        return no(entry.twice, text, "the field stands there twice")
    for name in _FIELDS:
        if entry.get(name) is None:
            return no(name, text, "the field is missing")
    timestamp = entry["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp != timestamp:  # NaN
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
