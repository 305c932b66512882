"""The rows that an ingest rejects: written as they come, so that a log of nothing but faults takes no memory either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.trace import REJECTED_SCHEMA, RejectedReason
from traces.registry import Rejected

OTHER_REASONS = "other reasons"
MOST_REASONS = 1000
"""Reasons are few by design; column names from a hostile log must not fill memory all the same."""


class RejectedRows:
    """Appends to a Parquet file of REJECTED_SCHEMA, and counts by reason. Close it before the file is read or moved."""

    def __init__(self, file: Path) -> None:
        """Open `file` for writing."""
        self.file = file
        self.count = 0
        self._writer = pq.ParquetWriter(file, REJECTED_SCHEMA, compression="zstd")
        self._counts: Counter[str] = Counter()
        self._first: dict[str, tuple[str, int]] = {}

    def add(self, log: Path, rows: Sequence[Rejected]) -> None:
        """Account for a batch's rejected rows."""
        if not rows:
            return
        self.count += len(rows)
        columns = {
            "file": [str(log)] * len(rows),
            "line": [row.line for row in rows],
            "column": [row.column for row in rows],
            "text": [row.text for row in rows],
            "reason": [row.reason for row in rows],
        }
        self._writer.write_table(pa.table(columns, schema=REJECTED_SCHEMA))
        for row in rows:
            reason = row.reason if row.column is None else f"{row.column}: {row.reason}"
            if reason not in self._counts and len(self._counts) >= MOST_REASONS:
                reason = OTHER_REASONS
            self._counts[reason] += 1
            self._first.setdefault(reason, (str(log), row.line))

    def reasons(self) -> list[RejectedReason]:
        """Reasons, the most frequent first; their rows add up to `count`."""
        return [
            RejectedReason(
                reason=reason, rows=rows, first_file=self._first[reason][0], first_line=self._first[reason][1]
            )
            for reason, rows in self._counts.most_common()
        ]

    def close(self) -> None:
        """Finish the file. Harmless when it is closed already."""
        self._writer.close()
