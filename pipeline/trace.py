"""Reading a trace folder back: plain arrays for the stages, the rest as an Arrow table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import InputError
from schemas.trace import REPORT_FILE, TRACE_FILE, TRACE_SCHEMA, IngestReport, TraceMeta


@dataclass(frozen=True)
class Trace:
    """A trace in memory: n requests by arrival. Lengths in tokens."""

    path: Path  # the trace folder
    meta: TraceMeta
    report: IngestReport | None  # null where the folder holds no account of its ingest
    arrival_us: NDArray[np.int64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    block_offsets: NDArray[np.int64]  # [n + 1] into block_ids; no ids where identity is unknown
    block_ids: NDArray[np.uint32]
    has_identity: NDArray[np.bool_]
    table: pa.Table  # the columns besides prefix_blocks


def read_trace(path: Path) -> Trace:
    """Read a trace folder (or the `trace.parquet` in it).

    Raises InputError where there is none, or where it does not keep the contract of `schemas.trace`.
    """
    folder = path.parent if path.name == TRACE_FILE else path
    file = folder / TRACE_FILE
    if not file.is_file():
        if not path.exists():
            raise InputError("no such trace", file=path, mend="make one with `preplay ingest LOG`")
        mend = (
            f"make a trace of it first: preplay ingest {path}"
            if path.is_file()
            else "name a folder made by `preplay ingest`"
        )
        raise InputError("not a trace folder", file=path, mend=mend)
    try:
        parquet = pq.ParquetFile(file)
        meta = TraceMeta.from_metadata(parquet.metadata.metadata, file)
        table = parquet.read()
    except (pa.ArrowInvalid, OSError) as problem:
        raise InputError(
            f"damaged Parquet file ({str(problem).splitlines()[0]})", file=file, mend="ingest the log again"
        ) from None
    missing = [name for name in TRACE_SCHEMA.names if name not in table.column_names]
    if missing:
        raise InputError(f"lacks the columns {', '.join(missing)}", file=file, mend="ingest the log again")
    if table.num_rows == 0:
        raise InputError("holds no requests", file=file)
    blocks = table["prefix_blocks"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(blocks), 0).to_numpy().astype(np.int64)
    trace = Trace(
        path=folder,
        meta=meta,
        report=_report(folder / REPORT_FILE),
        arrival_us=_column(table, "arrival_us"),
        input_tokens=_column(table, "input_tokens"),
        output_tokens=_column(table, "output_tokens"),
        block_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        block_ids=np.array(blocks.flatten().to_numpy()),
        has_identity=pc.is_valid(blocks).to_numpy(zero_copy_only=False),
        table=table.drop_columns(["prefix_blocks"]),
    )
    _check(trace, file)
    return trace


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    # A copy, because Arrow's arrays are read-only and kernels would be compiled once more for those.
    return np.array(table[name].to_numpy())


def _check(trace: Trace, file: Path) -> None:
    """A trace that another program wrote may break the contract; a replay of it would be a wrong number."""
    if (np.diff(trace.arrival_us) < 0).any():
        row = int(np.flatnonzero(np.diff(trace.arrival_us) < 0)[0]) + 1
        raise InputError("arrivals are not in order", file=file, place=f"row {row}", mend="ingest the log again")
    for name, values in (("input_tokens", trace.input_tokens), ("output_tokens", trace.output_tokens)):
        if (values < 1).any():
            row = int(np.flatnonzero(values < 1)[0])
            raise InputError(f"{name} is not at least 1", file=file, place=f"row {row}", mend="ingest the log again")
    if trace.meta.block_tokens is not None:
        whole = trace.input_tokens // trace.meta.block_tokens
        excess = np.diff(trace.block_offsets) - whole
        wrong = trace.has_identity & ((excess < 0) | (excess > 1))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(
                "prefix_blocks does not fit input_tokens", file=file, place=f"row {row}", mend="ingest the log again"
            )


def _report(file: Path) -> IngestReport | None:
    if not file.is_file():
        return None
    try:
        return IngestReport.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError("damaged, or of another version", file=file, mend="ingest the log again") from None
