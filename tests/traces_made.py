"""Small canonical traces made by hand, for tests that need sessions or tenants."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.trace import Trace, read_trace
from schemas.trace import TRACE_FILE, TRACE_SCHEMA, TraceMeta


def made_trace(folder: Path, rows: list[dict], block_tokens: int = 512) -> Trace:
    """A trace of `rows`: at least arrival_s, input_tokens, output_tokens; prefix_blocks null = identity unknown."""
    full = [
        dict.fromkeys(TRACE_SCHEMA.names)
        | {"request_id": str(place), "identity": 0, "status": "completed"}
        | {name: value for name, value in row.items() if name != "arrival_s"}
        | {"arrival_us": round(row["arrival_s"] * 1e6)}
        for place, row in enumerate(rows)
    ]
    meta = TraceMeta(
        source_format="made", block_tokens=block_tokens, prefix_identity="known", start_utc=None, sources=()
    )
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(full, schema=TRACE_SCHEMA).replace_schema_metadata(meta.as_metadata())
    pq.write_table(table, folder / TRACE_FILE)
    return read_trace(folder)
