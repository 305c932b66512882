"""The run folder as a DuckDB database: views over its Parquet files.

`preplay.duckdb` in the folder holds the views with paths relative to it, for any DuckDB shell started there (1.4 or later).
`connect` makes the same views over the folder wherever it lies, read only, in a sandbox that sees nothing but the folder.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from schemas.errors import QueryError, RunError
from schemas.manifest import DATABASE_FILE, MANIFEST_FILE, RUN_VERSION, Manifest

STORAGE_VERSION = "v1.4.0"
"""Readable by DuckDB shells of 1.4 and later; a file of this program's own DuckDB 2 would not be."""

VIEWS = {
    "scenarios": "tables/scenarios.parquet",
    "slo": "tables/slo.parquet",
    "ingest": "tables/ingest.parquet",
    "rejected_reasons": "tables/rejected_reasons.parquet",
    "elasticities": "tables/elasticities.parquet",
    "reuse_curve": "reuse/curve.parquet",
    "reuse_requests": "reuse/requests.parquet",
    "reuse_distance": "reuse/distance.parquet",
}
"""View name -> Parquet file in the run folder."""

PARTITIONED = {"all_outcomes": "outcomes", "timeline": "timeline"}
"""View name -> folder of `scenario=*/seed=*/part-*.parquet`; scenario and seed are columns."""

MEASURED = "CREATE VIEW outcomes AS SELECT * EXCLUDE (warmup) FROM all_outcomes WHERE NOT warmup"
"""What every result is taken over: the warm-up is replayed, not measured."""


def sql_text(value: str) -> str:
    """`value` as a SQL string literal. DDL takes no parameters, so this is where literals are made."""
    return "'" + value.replace("'", "''") + "'"


def view_statements(folder: str) -> list[str]:
    """CREATE VIEW statements over the run folder at `folder` ('' = the current one)."""
    prefix = f"{folder}/" if folder else ""
    statements = [
        f"CREATE VIEW {name} AS SELECT * FROM read_parquet({sql_text(prefix + file)})" for name, file in VIEWS.items()
    ]
    for name, place in PARTITIONED.items():
        pattern = sql_text(f"{prefix}{place}/*/*/*.parquet")
        statements.append(
            f"CREATE VIEW {name} AS SELECT * FROM read_parquet({pattern}, hive_partitioning = true, "
            "hive_types = {'scenario': VARCHAR, 'seed': BIGINT})"
        )
    statements.append(MEASURED)
    manifest = sql_text(f"{prefix}{MANIFEST_FILE}")
    statements.append(
        "CREATE VIEW manifest AS SELECT key, json_extract_string(json, key) AS value "
        f"FROM (SELECT json, unnest(json_keys(json)) AS key FROM read_json_objects({manifest}))"
    )
    return statements


def create_database(folder: Path) -> None:
    """Write `preplay.duckdb` into a run folder whose Parquet files are complete."""
    file = folder / DATABASE_FILE
    file.unlink(missing_ok=True)
    with duckdb.connect() as connection:
        connection.execute(f"SET file_search_path = {sql_text(str(folder))}")
        connection.execute(f"ATTACH {sql_text(str(file))} AS run (STORAGE_VERSION '{STORAGE_VERSION}')")
        connection.execute("USE run")
        for statement in view_statements(""):
            connection.execute(statement)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder. Raises RunError where the folder is none, or of another version."""
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise RunError(
            "not a run folder (no manifest.json)", file=folder, mend="make one with `preplay run STUDY.toml`"
        )
    try:
        manifest = Manifest.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError:
        raise RunError("manifest of another version or damaged", file=file, mend="run the study again") from None
    if manifest.version != RUN_VERSION:
        raise RunError(
            f"run version {manifest.version}, this Preplay reads {RUN_VERSION}", file=file, mend="run the study again"
        )
    return manifest


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """The run folder's views in a sandboxed in-memory database. Raises RunError where the folder is incomplete."""
    home = folder.resolve()
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"})
    try:
        for statement in view_statements(str(home)):
            connection.execute(statement)
    except duckdb.IOException as problem:
        connection.close()
        raise RunError(
            f"a table is missing ({_first_line(problem)})", file=folder, mend="run the study again"
        ) from None
    connection.execute(f"SET allowed_directories = [{sql_text(str(home))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def query(folder: Path, sql: str) -> tuple[list[str], list[tuple[object, ...]]]:
    """Run one read-only statement: (column names, rows). Raises QueryError with DuckDB's own words."""
    read_manifest(folder)
    with connect(folder) as connection:
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1:
                raise QueryError(f"{len(statements)} statements given", mend="give exactly one")
            kind = statements[0].type
            if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
                raise QueryError(f"{kind.name} is not a query", mend="the database is read only: use SELECT")
            result = connection.execute(statements[0])
            names = _distinct([column[0] for column in result.description or []])
            return names, result.fetchall()
        except duckdb.Error as problem:
            raise QueryError(_first_line(problem)) from None


def _distinct(names: list[str]) -> list[str]:
    """Column names, the second of equal ones as ``NAME_2`` and so on: records would lose it otherwise."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result


def _first_line(problem: Exception) -> str:
    """DuckDB's message without its hints and its picture of the statement."""
    text = str(problem)
    kept = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("LINE", "^"))]
    return " ".join(kept[:3]) or type(problem).__name__
