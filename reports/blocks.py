"""What a section is made of. Plain data: the template alone knows HTML."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table as it is read (text cells) with its data as CSV (raw values)."""

    name: str  # file name of the CSV, without ending
    columns: tuple[str, ...]  # headers, units in them
    rows: tuple[tuple[str, ...], ...]
    csv_columns: tuple[str, ...]
    csv_rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    numeric_from: int = 1  # columns from this one on are aligned right
    folded: bool = False  # shown on demand

    @property
    def csv_uri(self) -> str:
        """The data as a data: URI, so that a download needs no network."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.csv_columns)
        writer.writerows([[_safe_cell(cell) for cell in row] for row in self.csv_rows])
        return "data:text/csv;base64," + base64.b64encode(text.getvalue().encode()).decode()


def _safe_cell(cell: Any) -> Any:
    """Spreadsheets run cells that begin like a formula; a tenant's name must not become one."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def table_of(
    name: str,
    columns: Sequence[tuple[str, str, Any]],
    rows: Sequence[dict[str, Any]],
    *,
    caption: str = "",
    numeric_from: int = 1,
    folded: bool = False,
) -> Table:
    """A table from query rows: `columns` are (header, key, how to write a value)."""
    keys = list(rows[0]) if rows else [key for _, key, _ in columns]
    return Table(
        name=name,
        columns=tuple(header for header, _, _ in columns),
        rows=tuple(tuple(write(row[key]) for _, key, write in columns) for row in rows),
        csv_columns=tuple(keys),
        csv_rows=tuple(tuple(row[key] for key in keys) for row in rows),
        caption=caption,
        numeric_from=numeric_from,
        folded=folded,
    )


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification, a caption that says how to read it, and the data as a table."""

    spec: dict[str, Any]
    caption: str
    table: Table | None = None


@dataclass(frozen=True)
class Note:
    """A paragraph. `kind`: plain, warning (with an icon and the word)."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Tile:
    """One headline number with its change against the baseline and its interval."""

    label: str
    value: str
    change: str
    interval: str
    ok: bool | None = None  # None = not held against a limit


@dataclass(frozen=True)
class Tiles:
    """A row of tiles under a label."""

    title: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Code:
    """Commands or text to copy."""

    text: str


Block = Table | Chart | Note | Tiles | Code


@dataclass(frozen=True)
class Section:
    """One section: its number in the report's order, a short name for navigation, the finding as its heading."""

    number: int
    name: str
    finding: str
    blocks: list[Block] = field(default_factory=list)
