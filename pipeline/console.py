"""Talking and printing: progress on stderr, data on stdout in one of three formats."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import date, datetime
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """How data is printed."""

    table = "table"
    json = "json"
    csv = "csv"


NOT_IN_THE_LOG = "not known from this log"


class Console:
    """Lines of talk on stderr; silent when asked."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def say(self, line: str) -> None:
        """One line of talk."""
        if not self.quiet:
            try:
                print(line, file=sys.stderr, flush=True)
            except BrokenPipeError:  # nobody listens any more: that is no reason to stop working
                self.quiet = True

    def compiling(self) -> None:
        """Say what the first run waits for."""
        from pipeline.jit import COMPILING, compiled_before

        if not compiled_before():
            self.say(COMPILING)


def print_records(
    records: Sequence[dict[str, Any]],
    output: Format,
    *,
    tall: bool = False,
    columns: Sequence[str] | None = None,
    unknown: str = "unknown",
) -> None:
    """Print records on stdout. `tall`: a table of one record is printed as name and value.

    None is what is not known: `unknown` in a table, null in JSON, empty in CSV. A reader that closes our stdout early has
    seen enough.
    """
    try:
        _print_records(records, output, tall=tall, columns=columns, unknown=unknown)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_records(
    records: Sequence[dict[str, Any]], output: Format, *, tall: bool, columns: Sequence[str] | None, unknown: str
) -> None:
    names = list(columns) if columns is not None else list(dict.fromkeys(name for record in records for name in record))
    if output is Format.json:
        json.dump([{name: _plain(record.get(name)) for name in names} for record in records], sys.stdout, indent=2)
        print()
    elif output is Format.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([[_csv_cell(record.get(name)) for name in names] for record in records])
    elif tall and len(records) == 1:
        width = max(len(name) for name in names)
        for name in names:
            print(f"{name:<{width}}  {_cell(records[0].get(name), unknown)}")
    else:
        _print_table(names, records, unknown)


def _print_table(names: list[str], records: Sequence[dict[str, Any]], unknown: str) -> None:
    cells = [[_cell(record.get(name), unknown) for name in names] for record in records]
    numeric = [all(isinstance(r.get(n), int | float | type(None)) for r in records) for n in names]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(names)]

    def line(row: Sequence[str]) -> str:
        parts = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    print(line(names))
    print("  ".join("-" * width for width in widths))
    for row in cells:
        print(line(row))


def _cell(value: Any, unknown: str) -> str:
    """A value for human eyes: thousands separated, six digits, unknown said."""
    if value is None:
        return unknown
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, list | tuple | dict):
        return json.dumps(_plain(value))
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))


def _csv_cell(value: Any) -> Any:
    return json.dumps(_plain(value)) if isinstance(value, list | tuple | dict) else value


def _plain(value: Any) -> Any:
    """A value that JSON can hold; NaN and infinities, which it can't, become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
