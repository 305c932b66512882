"""Sorting a trace that is larger than memory: DuckDB's external sort, streamed back into Parquet."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.warehouse import sql_text
from schemas.trace import TRACE_SCHEMA, TraceMeta

MEMORY_LIMIT = "1GB"
_BATCH_ROWS = 65_536


def sorted_by_arrival(source: Path, target: Path, first_us: int, meta: TraceMeta) -> int:
    """`source` (TRACE_SCHEMA, arrivals as logged) sorted by arrival, ties in file order, relative to `first_us`.

    Returns the number of distinct arrivals.
    """
    distinct = 0
    latest = -1
    with duckdb.connect() as connection, pq.ParquetWriter(target, TRACE_SCHEMA, compression="zstd") as writer:
        connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        connection.execute(f"SET temp_directory = {sql_text(str(source.parent / '.sort'))}")
        relation = connection.sql(
            f"SELECT * EXCLUDE file_row_number REPLACE (arrival_us - {int(first_us)} AS arrival_us) "
            f"FROM read_parquet({sql_text(str(source))}, file_row_number = true) ORDER BY arrival_us, file_row_number"
        )
        for batch in relation.to_arrow_reader(_BATCH_ROWS):
            columns = [
                batch.column(field.name).dictionary_encode().cast(field.type)
                if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(batch.column(field.name).type)
                else batch.column(field.name).cast(field.type)
                for field in TRACE_SCHEMA
            ]
            arrivals = np.concatenate([[latest], columns[TRACE_SCHEMA.get_field_index("arrival_us")].to_numpy()])
            distinct += int(np.count_nonzero(np.diff(arrivals)))
            latest = int(arrivals[-1])
            writer.write_table(pa.table(columns, schema=TRACE_SCHEMA))
        writer.add_key_value_metadata(meta.as_metadata())
    return distinct
