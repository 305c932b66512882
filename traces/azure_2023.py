"""Azure's LLM inference traces of 2023: CSV, lengths only.

Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md (CC-BY-4.0), described in "Splitwise", ISCA 2024.

| column | type | meaning |
| --- | --- | --- |
| TIMESTAMP | `2023-11-16 18:15:46.6805900` | arrival, UTC (no zone written), 100 ns digits; cut to microseconds |
| ContextTokens | integer | prompt tokens |
| GeneratedTokens | integer | generated tokens |

There is nothing about what the prompts were: prefix identity is unknown, and so is all reuse.
"""

from __future__ import annotations

import re
from datetime import datetime

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv

from schemas.trace import PrefixIdentity
from traces.lines import numbered_lines
from traces.registry import Batch, Rejected, parse_in_pieces, register

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HEADER = ",".join(_COLUMNS).encode()
_TIMESTAMP = r"^[12]\d{3}-\d{2}-\d{2} \d{2}:\d{2}:[0-5]\d(\.\d{1,9})?$"
_TOKENS = r"^[1-9][0-9]{0,8}$"
_EPOCH = datetime(1970, 1, 1)


class Azure2023:
    """See the module's docstring."""

    name = "azure-2023"
    title = "Azure LLM inference trace 2023 (CSV with TIMESTAMP, ContextTokens, GeneratedTokens)"
    has_header = True
    wall_clock = True
    block_tokens: int | None = None
    prefix_identity: PrefixIdentity = "unknown"

    def detect(self, first_line: bytes) -> str | None:
        """The header, exactly."""
        if first_line == _HEADER:
            return f"azure-2023: the header is {_HEADER.decode()}; timestamps read as UTC"
        return None

    def header_fault(self, header: bytes) -> str | None:
        """Anything but the header."""
        if header == _HEADER:
            return None
        return f"the header is {header[:80].decode('utf-8', 'replace')!r}, expected {_HEADER.decode()!r}"

    def parse(self, chunk: bytes, first_line: int) -> Batch:
        """All rows at once where every one of them is in order, else line by line."""
        return parse_in_pieces(chunk, first_line, _parse_clean, _parse_careful)


def _parse_clean(chunk: bytes, first_line: int) -> Batch | None:
    """The whole chunk as text columns, each held against its pattern; None where any row fails."""
    body = chunk.rstrip(b"\r\n")
    # To Arrow a lone carriage return ends a line too; line numbers are counted by \n.
    if b"\0" in body or b'"' in body or not body.isascii() or body.count(b"\r") != body.count(b"\r\n"):
        return None
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(body),
            read_options=pyarrow.csv.ReadOptions(column_names=list(_COLUMNS), block_size=max(len(body) + 1, 1024)),
            parse_options=pyarrow.csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(_COLUMNS, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:  # a line of other than three fields, a blank one among them
        return None
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    fine = frame.select(
        pl.col("TIMESTAMP").str.contains(_TIMESTAMP).all()
        & pl.col("ContextTokens").str.contains(_TOKENS).all()
        & pl.col("GeneratedTokens").str.contains(_TOKENS).all()
    ).item()
    if not fine or frame.height != body.count(b"\n") + 1:
        return None
    times = frame["TIMESTAMP"].str.slice(0, 26).str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False)
    if times.null_count():
        return None
    return Batch(
        lines=np.arange(first_line, first_line + frame.height, dtype=np.int64),
        arrival_us=times.cast(pl.Int64).to_numpy(),
        input_tokens=frame["ContextTokens"].cast(pl.Int32).to_numpy(),
        output_tokens=frame["GeneratedTokens"].cast(pl.Int32).to_numpy(),
        block_offsets=None,
        raw_blocks=None,
        rejected=[],
    )


def _parse_careful(chunk: bytes, first_line: int) -> Batch:
    """Line by line, naming each fault."""
    rows: list[tuple[int, int, int, int]] = []
    rejected: list[Rejected] = []
    for number, line in numbered_lines(chunk, first_line):
        row = _row(number, line)
        if isinstance(row, Rejected):
            rejected.append(row)
        else:
            rows.append(row)
    table = np.array(rows, np.int64).reshape(len(rows), 4)
    return Batch(
        lines=table[:, 0],
        arrival_us=table[:, 1],
        input_tokens=table[:, 2].astype(np.int32),
        output_tokens=table[:, 3].astype(np.int32),
        block_offsets=None,
        raw_blocks=None,
        rejected=rejected,
    )


def _row(number: int, line: bytes) -> tuple[int, int, int, int] | Rejected:
    """One line as (line, arrival us, input, output), or what is wrong with it."""
    text = line.decode("utf-8", "backslashreplace")

    def no(column: str | None, shown: str, reason: str) -> Rejected:
        return Rejected.of(number, column, shown, reason)

    if not line.isascii():
        return no(None, text, "not plain ASCII")
    fields = text.split(",")
    if len(fields) != len(_COLUMNS):
        return no(None, text, f"not {len(_COLUMNS)} fields")
    arrival = _microseconds(fields[0])
    if arrival is None:
        return no(_COLUMNS[0], fields[0], "not a timestamp like 2023-11-16 18:15:46.6805900")
    tokens = []
    for name, value in zip(_COLUMNS[1:], fields[1:], strict=True):
        if not re.fullmatch(r"-?\d+", value, re.ASCII):
            return no(name, value, "missing" if not value.strip() else "not a whole number")
        if not re.fullmatch(_TOKENS, value):
            return no(name, value, _why_no_tokens(value))
        tokens.append(int(value))
    return number, arrival, tokens[0], tokens[1]


def _why_no_tokens(value: str) -> str:
    """What is wrong with a whole number that isn't a length. Told by its digits: Python refuses to read very long ones."""
    if value.startswith("-") or not value.strip("0"):
        return "not at least 1 token"
    return "zeros in front" if value.startswith("0") else "absurd"


def _microseconds(text: str) -> int | None:
    """Microseconds since 1970 UTC; digits beyond are cut. None = no such time."""
    if not re.match(_TIMESTAMP, text, re.ASCII) or text.endswith("\n"):
        return None
    try:
        since = datetime.fromisoformat(text[:19]) - _EPOCH
    except ValueError:
        return None
    return (since.days * 86_400 + since.seconds) * 1_000_000 + int(text[20:26].ljust(6, "0"))


register(Azure2023())
