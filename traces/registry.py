"""What a log format is, and which there are. A new format is one new module in this package that registers itself.

A format turns chunks of whole lines into columnar batches. Every non-blank line is either a kept row of the batch or a
`Rejected`: nothing else can happen to it, and nothing raises for the fault of a single row.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import traces
from schemas.errors import InputError
from schemas.trace import PrefixIdentity

MAX_TOKENS = 2**31 - 1
SHOWN_CHARACTERS = 200
PIECE_BYTES = 64 * 1024
"""How much of a chunk is read line by line for the sake of one unusual line in it."""


@dataclass(frozen=True)
class Rejected:
    """A line that can't be used, with the column at fault (None = the line as a whole) and what stood there."""

    line: int
    column: str | None
    text: str
    reason: str

    @classmethod
    def of(cls, line: int, column: str | None, shown: object, reason: str) -> Rejected:
        """The same with any value as the offending text: cut short, and valid UTF-8 even where the log isn't."""
        try:
            text = str(shown)[:SHOWN_CHARACTERS]
        except RecursionError:
            text = "(nested too deep to show)"
        return cls(line, column, text.encode("utf-8", "backslashreplace").decode(), reason)


@dataclass(frozen=True)
class Batch:
    """The usable rows of a chunk, column by column (n rows), and the rest."""

    lines: NDArray[np.int64]  # [n] line numbers in the file, from 1
    arrival_us: NDArray[np.int64]  # [n] microseconds on the log's own clock (since 1970 UTC where it is a wall clock)
    input_tokens: NDArray[np.int32]  # [n]
    output_tokens: NDArray[np.int32]  # [n]
    block_offsets: NDArray[np.int64] | None  # [n + 1] into raw_blocks; None = the log has no prefix identity
    raw_blocks: NDArray[np.int64] | None  # the log's own block hashes
    rejected: list[Rejected]
    columns: dict[str, pa.Array] = field(default_factory=dict)  # further columns of TRACE_SCHEMA, as the log has them


class TraceFormat(Protocol):
    """One exported-log format. Stateless: everything about a file is in its chunks."""

    name: str
    title: str
    has_header: bool  # the first line names the columns
    wall_clock: bool  # arrivals are UTC, not an offset
    block_tokens: int | None
    prefix_identity: PrefixIdentity

    def detect(self, first_line: bytes) -> str | None:
        """Evidence that a file of this first (non-blank) line is of this format, in words; None = it is not."""
        ...

    def header_fault(self, header: bytes) -> str | None:
        """What is wrong with a header line; None = nothing, or the format has none."""
        ...

    def parse(self, chunk: bytes, first_line: int) -> Batch:
        """Whole lines to a batch; `first_line` is the number of the chunk's first line."""
        ...


def parse_in_pieces(
    chunk: bytes,
    first_line: int,
    clean: Callable[[bytes, int], Batch | None],
    careful: Callable[[bytes, int], Batch],
) -> Batch:
    """A chunk by its format's two paths: `clean` reads all or refuses, `careful` names each fault.

    Where the whole chunk is refused, each piece of about PIECE_BYTES is tried anew: one bad row must not make the other
    hundred thousand slow. So `clean` must judge every line by itself, wherever in a chunk it stands.
    """
    batch = clean(chunk, first_line)
    if batch is not None:
        return batch
    if len(chunk) <= PIECE_BYTES:
        return careful(chunk, first_line)
    return joined([clean(piece, line) or careful(piece, line) for piece, line in _pieces(chunk, first_line)])


def _pieces(chunk: bytes, first_line: int) -> Iterator[tuple[bytes, int]]:
    """(whole lines of at least PIECE_BYTES, number of the first)."""
    begin = 0
    while begin < len(chunk):
        end = chunk.find(b"\n", begin + PIECE_BYTES) + 1 or len(chunk)
        yield chunk[begin:end], first_line
        first_line += chunk.count(b"\n", begin, end)
        begin = end


def joined(parts: Sequence[Batch]) -> Batch:
    """Batches of one format, one after the other, as one."""
    raw = [part.raw_blocks for part in parts if part.raw_blocks is not None]
    counts = [np.diff(part.block_offsets) for part in parts if part.block_offsets is not None]
    return Batch(
        lines=np.concatenate([part.lines for part in parts]),
        arrival_us=np.concatenate([part.arrival_us for part in parts]),
        input_tokens=np.concatenate([part.input_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        block_offsets=np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64) if counts else None,
        raw_blocks=np.concatenate(raw) if raw else None,
        rejected=[row for part in parts for row in part.rejected],
        columns={name: pa.concat_arrays([part.columns[name] for part in parts]) for name in parts[0].columns},
    )


_FORMATS: dict[str, TraceFormat] = {}


def register(format_: TraceFormat) -> None:
    """Called by each format's module when it is imported."""
    _FORMATS[format_.name] = format_


@cache
def formats() -> dict[str, TraceFormat]:
    """Every format by name, after importing all modules of this package."""
    for module in pkgutil.iter_modules(traces.__path__):
        importlib.import_module(f"traces.{module.name}")
    return dict(sorted(_FORMATS.items()))


def format_named(name: str) -> TraceFormat:
    """The format of that name. Raises InputError with the known names."""
    known = formats()
    if name not in known:
        raise InputError(f"unknown log format '{name}'", mend=f"known: {', '.join(known)}")
    return known[name]


def detect_format(first_line: bytes, file: str) -> tuple[TraceFormat, str]:
    """The one format that a file's first line speaks for, and the evidence.

    Raises InputError where none or several do.
    """
    found = [(each, evidence) for each in formats().values() if (evidence := each.detect(first_line)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(each.name for each, _ in found)
        raise InputError(f"could be any of {names}", file=file, mend="name one with --log-format")
    shown = first_line[:80].decode("utf-8", "replace")
    raise InputError(
        f"not a log that Preplay knows (it begins with {shown!r})",
        file=file,
        place=1,
        mend=f"known formats: {', '.join(formats())}",
    )
