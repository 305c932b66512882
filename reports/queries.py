"""The named queries: one .sql file per figure, whose first comment says its grain and units."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb

from pipeline.warehouse import connect

Row = dict[str, Any]


@dataclass(frozen=True)
class Warehouse:
    """A run folder's database, open for the named queries."""

    folder: Path
    connection: duckdb.DuckDBPyConnection

    @classmethod
    def open(cls, folder: Path) -> Warehouse:
        """Raises RunError where the folder is no complete run."""
        return cls(folder, connect(folder))

    def rows(self, name: str) -> list[Row]:
        """All rows of the query `name`."""
        cursor = self.connection.cursor()
        result = cursor.execute(sql_of(name))
        columns = [column[0] for column in result.description or []]
        return [dict(zip(columns, values, strict=True)) for values in result.fetchall()]

    def row(self, name: str) -> Row | None:
        """The only row of a query, None where there is none."""
        rows = self.rows(name)
        return rows[0] if rows else None


def sql_of(name: str) -> str:
    """The text of a named query."""
    return resources.files("reports").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def query_names() -> list[str]:
    """Every named query."""
    folder = resources.files("reports").joinpath("sql")
    return sorted(file.name.removesuffix(".sql") for file in folder.iterdir() if file.name.endswith(".sql"))
