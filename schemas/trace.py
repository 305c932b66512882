"""The canonical trace: its Parquet columns, its side tables and its file metadata.

A trace is a folder::

    trace.parquet        one row per request, sorted by arrival (TRACE_SCHEMA; TraceMeta in the file metadata)
    identities.parquet   one row per identity contract (IDENTITY_SCHEMA); `trace.identity` is its row number
    rejected.parquet     every row of the log that could not be used (REJECTED_SCHEMA)
    ingest.json          what was read, kept and rejected, and why (IngestReport)

Prefix identity. `prefix_blocks` holds the ids of the prompt's blocks of `block_tokens` tokens, in order. An id names its
block *and everything before it* under one identity contract: equal ids mean equal whole prefixes. The list has
``input_tokens // block_tokens`` entries, or one more where the log also names the partial last block. ``null`` means that
the log doesn't tell what the prompt was; it never means "no reuse".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from schemas.errors import InputError

TRACE_VERSION = 1
"""Version of the trace folder's layout; a reader refuses any other."""

PrefixIdentity = Literal["known", "inferred", "unknown"]

STATUSES = ("completed", "cancelled", "failed")

TRACE_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("arrival_us", pa.int64(), nullable=False),
        pa.field("model", pa.string()),
        pa.field("tenant", pa.string()),
        pa.field("session_id", pa.string()),
        pa.field("turn", pa.int32()),
        pa.field("identity", pa.int32(), nullable=False),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("prefix_blocks", pa.list_(pa.field("element", pa.uint32(), nullable=False))),
        pa.field("status", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("observed_cached_tokens", pa.int32()),
        pa.field("observed_ttft_ms", pa.float64()),
        pa.field("observed_tpot_ms", pa.float64()),
        pa.field("observed_e2e_ms", pa.float64()),
        pa.field("observed_draft_tokens", pa.int32()),
        pa.field("observed_accepted_tokens", pa.int32()),
        pa.field("observed_spec_steps", pa.int32()),
    ]
)

IDENTITY_SCHEMA = pa.schema(
    [
        pa.field("identity", pa.int32(), nullable=False),
        pa.field("model", pa.string()),
        pa.field("model_revision", pa.string()),
        pa.field("tokenizer", pa.string()),
        pa.field("adapter", pa.string()),
        pa.field("multimodal", pa.string()),
        pa.field("position_scheme", pa.string()),
        pa.field("kv_dtype", pa.string()),
        pa.field("trust_domain", pa.string()),
    ]
)

REJECTED_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("column", pa.string()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)

TRACE_FILE = "trace.parquet"
IDENTITIES_FILE = "identities.parquet"
REJECTED_FILE = "rejected.parquet"
REPORT_FILE = "ingest.json"

_META_KEY = b"preplay.trace"


class SourceFile(BaseModel):
    """One file of the log, as it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: int
    sha256: str


class TraceMeta(BaseModel):
    """File metadata of `trace.parquet`, stored as JSON under the key ``preplay.trace``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = TRACE_VERSION
    source_format: str
    block_tokens: int | None = Field(description="tokens per prefix block; null where identity is unknown")
    prefix_identity: PrefixIdentity
    start_utc: str | None = Field(description="wall clock of arrival_us = 0, ISO 8601 UTC; null where the log has none")
    sources: tuple[SourceFile, ...]
    ingest_options: tuple[str, ...] = Field(default=(), description="options that the ingest was given, to repeat it")

    def as_metadata(self) -> dict[bytes, bytes]:
        """Key-value pairs for a Parquet footer."""
        return {_META_KEY: self.model_dump_json().encode()}

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None, file: Path) -> TraceMeta:
        """Read it back. Raises InputError where the file is no trace, or a trace of another version."""
        raw = (metadata or {}).get(_META_KEY)
        if raw is None:
            raise InputError("not a Preplay trace", file=file, mend="make one from a log with `preplay ingest LOG`")
        meta = cls.model_validate_json(raw)
        if meta.version != TRACE_VERSION:
            raise InputError(
                f"trace version {meta.version}, this Preplay reads {TRACE_VERSION}",
                file=file,
                mend="ingest the log again",
            )
        return meta


class RejectedReason(BaseModel):
    """One reason for rejecting rows, with how often it occurred and where first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str
    rows: int
    first_file: str
    first_line: int


class IngestReport(BaseModel):
    """`ingest.json`: the account of an ingest. ``rows_read == rows_kept + rows_rejected`` always holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_format: str
    evidence: str
    sources: tuple[SourceFile, ...]
    rows_read: int
    rows_kept: int
    rows_rejected: int
    rejected_by_reason: tuple[RejectedReason, ...]
    rows_reordered: int = Field(
        description="rows that came before an earlier arrival and were sorted, with --sort only"
    )
    span_s: float
    input_tokens: int
    output_tokens: int
    distinct_arrivals: int
    block_tokens: int | None
    distinct_blocks: int | None
    prefix_identity: PrefixIdentity
    start_utc: str | None
