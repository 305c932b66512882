"""Exported logs to a canonical trace. Every row is kept or rejected with its reason; nothing is repaired silently.

Logs are read in chunks of whole lines; memory holds one chunk and the table of distinct blocks. The trace folder appears when
it is complete. `rows_read == rows_kept + rows_rejected` is asserted, not hoped for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline import folders
from pipeline.identity import BlockIds
from pipeline.rejects import RejectedRows
from pipeline.sorting import sorted_by_arrival
from schemas.errors import InputError, TooManyRejected
from schemas.trace import (
    IDENTITIES_FILE,
    IDENTITY_SCHEMA,
    REJECTED_FILE,
    REPORT_FILE,
    TRACE_FILE,
    TRACE_SCHEMA,
    IngestReport,
    SourceFile,
    TraceMeta,
)
from traces.lines import LineReader, first_line_of
from traces.registry import Batch, TraceFormat, detect_format, format_named

MAX_REJECTED = 0.01
"""Share of rows that may be rejected unless the user says otherwise."""

ROW_GROUP_ROWS = 65_536

Progress = Callable[[Path, int], None]
"""Called after each chunk with the log and the rows read of all logs so far, rejected ones included."""

_UNSORTED_FILE = "unsorted.parquet"
_TRACE_FILES = frozenset({TRACE_FILE, IDENTITIES_FILE, REJECTED_FILE, REPORT_FILE})


def ingest(
    logs: Sequence[Path],
    out: Path,
    *,
    format: str | None = None,
    max_rejected: float = MAX_REJECTED,
    sort: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> IngestReport:
    """Read `logs` in the order given into the trace folder `out` (layout: schemas/trace.py).

    Raises InputError (a file that is no such log, timestamps out of order without `sort`), TooManyRejected (the rejected rows
    then lie in ``OUT.rejected.parquet``), RunError (`out` is there already, without `force`, or is something else than a trace).
    """
    if not 0 <= max_rejected <= 1:
        raise InputError(f"max_rejected is {max_rejected}, not a share from 0 to 1")
    folders.check_absent(out, force=force, own=_TRACE_FILES)
    known, evidence = _agreed_format(logs, format)
    partial = folders.partial_of(out)
    beside = out.with_name(f"{out.name}.rejected.parquet")
    with folders.claimed(partial, keep=False):
        rejects = RejectedRows(partial / REJECTED_FILE)
        account = _Account(known, evidence, rejects, sort=sort, options=_options(format, max_rejected, sort))
        try:
            _read_logs(logs, account, partial, max_rejected, progress)
        except TooManyRejected as problem:
            rejects.close()
            rejects.file.replace(beside)
            shutil.rmtree(partial)
            raise TooManyRejected(
                problem.problem,
                file=problem.file,
                place=problem.place,
                mend=f"{problem.mend}; the rejected rows lie in {beside}",
            ) from None
        except BaseException:
            rejects.close()
            shutil.rmtree(partial)
            raise
        rejects.close()
        report = account.report()
        folders.write_parquet(_identities(), partial / IDENTITIES_FILE)
        folders.write_text(report.model_dump_json(indent=2) + "\n", partial / REPORT_FILE)
        folders.publish(partial, out)
        beside.unlink(missing_ok=True)  # an earlier call that failed left it; the trace has its own now
    return report


def _read_logs(
    logs: Sequence[Path], account: _Account, partial: Path, max_rejected: float, progress: Progress | None
) -> None:
    """Write the trace file into `partial`. Raises what `ingest` raises for the content of the logs."""
    target, unsorted = partial / TRACE_FILE, partial / _UNSORTED_FILE
    with pq.ParquetWriter(unsorted if account.sort else target, TRACE_SCHEMA, compression="zstd") as writer:
        for number, log in enumerate(logs, start=1):
            for batch in _batches(log, account):
                if batch.lines.size:
                    writer.write_table(account.table(batch, number), row_group_size=ROW_GROUP_ROWS)
                if progress is not None:
                    progress(log, account.read)
        account.check(logs, max_rejected)
        if not account.sort:
            writer.add_key_value_metadata(account.meta().as_metadata())
    if account.sort:
        account.distinct_arrivals = sorted_by_arrival(unsorted, target, account.first_us, account.meta())
        unsorted.unlink()


def _agreed_format(logs: Sequence[Path], name: str | None) -> tuple[TraceFormat, str]:
    """The one format of all logs, and why. Raises InputError where they differ or a header is wrong."""
    chosen: TraceFormat | None = None
    evidence = ""
    for log in logs:
        first = first_line_of(log)
        if name is None:
            found, seen = detect_format(first, str(log))
        else:
            found, seen = format_named(name), f"{name}: named by the user"
            if (fault := found.header_fault(first)) is not None:
                raise InputError(fault, file=log, place=1, mend="name another format, or mend the header")
        if chosen is not None and found is not chosen:
            raise InputError(
                f"is {found.name}, the logs before it are {chosen.name}", file=log, mend="ingest them apart"
            )
        chosen, evidence = found, seen
    if chosen is None:
        raise InputError("no log was named")
    return chosen, evidence


def _batches(log: Path, account: _Account) -> Iterator[Batch]:
    """A log's chunks, parsed; its header is checked and skipped, a byte order mark too."""
    reader = LineReader(log)
    known = account.known
    header_due = known.has_header
    for chunk, line in reader.chunks():
        body, number = chunk, line
        if line == 1:
            body = body.removeprefix(b"\xef\xbb\xbf")
        while header_due and body:
            end = body.find(b"\n") + 1 or len(body)
            head, body, number = body[:end].strip(), body[end:], number + 1
            if head:
                header_due = False
        if body.strip():
            batch = known.parse(body, number)
            account.add(batch, log)
            yield batch
    account.sources.append(reader.source())


@dataclass
class _Account:
    """What has been read so far: counts, sums, rejected rows, known blocks."""

    known: TraceFormat
    evidence: str
    rejects: RejectedRows
    sort: bool
    options: tuple[str, ...]
    sources: list[SourceFile] = field(default_factory=list)
    kept: int = 0
    reordered: int = 0
    first_us: int = 0
    latest_us: int = 0
    earliest_us: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    distinct_arrivals: int = 0
    blocks: BlockIds = field(default_factory=BlockIds)

    @property
    def read(self) -> int:
        """Rows so far, kept or rejected."""
        return self.kept + self.rejects.count

    def add(self, batch: Batch, log: Path) -> None:
        """Enter a batch. Raises InputError for timestamps out of order, unless they will be sorted."""
        self.rejects.add(log, batch.rejected)
        if batch.lines.size == 0:
            return
        arrival = batch.arrival_us
        if self.kept == 0:
            self.first_us = self.latest_us = self.earliest_us = int(arrival[0])
            self.distinct_arrivals = 1
        before = np.maximum.accumulate(np.concatenate([[self.latest_us], arrival]))[:-1]
        late = arrival < before
        if late.any() and not self.sort:
            row = int(np.flatnonzero(late)[0])
            back = (int(before[row]) - int(arrival[row])) / 1e6
            raise InputError(
                f"timestamps out of order: {back:g} s before an earlier row's "
                f"({self._moment(int(arrival[row]))} after {self._moment(int(before[row]))})",
                file=log,
                place=int(batch.lines[row]),
                mend="give --sort to sort by arrival",
            )
        self.reordered += int(late.sum())
        self.distinct_arrivals += int((arrival > before).sum())  # counted anew where rows are sorted
        self.latest_us = max(self.latest_us, int(arrival.max()))
        self.earliest_us = min(self.earliest_us, int(arrival.min()))
        self.first_us = self.earliest_us if self.sort else self.first_us
        self.kept += batch.lines.size
        self.input_tokens += int(batch.input_tokens.sum(dtype=np.int64))
        self.output_tokens += int(batch.output_tokens.sum(dtype=np.int64))

    def table(self, batch: Batch, file_number: int) -> pa.Table:
        """A batch as TRACE_SCHEMA. Arrivals are relative to the first, or as logged where they are sorted later."""
        n = batch.lines.size
        shift = 0 if self.sort else self.first_us
        columns: dict[str, pa.Array] = {
            "request_id": pc.binary_join_element_wise(
                pa.scalar(str(file_number)), pa.array(batch.lines).cast(pa.string()), ":"
            ),
            "arrival_us": pa.array(batch.arrival_us - shift),
            "identity": pa.array(np.zeros(n, np.int32)),
            "input_tokens": pa.array(batch.input_tokens),
            "output_tokens": pa.array(batch.output_tokens),
            "prefix_blocks": self._prefix_blocks(batch, n),
            "status": pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int8)), pa.array(["completed"])),
            **batch.columns,
        }
        arrays = [columns.get(each.name, pa.nulls(n, each.type)) for each in TRACE_SCHEMA]
        return pa.table(arrays, schema=TRACE_SCHEMA)

    def _prefix_blocks(self, batch: Batch, n: int) -> pa.Array:
        kind = TRACE_SCHEMA.field("prefix_blocks").type
        if batch.block_offsets is None or batch.raw_blocks is None:
            return pa.nulls(n, kind)
        identity: NDArray[np.int32] = np.zeros(n, np.int32)
        dense = self.blocks.dense(batch.block_offsets, batch.raw_blocks, identity)
        return pa.ListArray.from_arrays(pa.array(batch.block_offsets.astype(np.int32)), pa.array(dense), type=kind)

    def check(self, logs: Sequence[Path], max_rejected: float) -> None:
        """Raises TooManyRejected, or InputError where no row was of use."""
        if self.read == 0:
            raise InputError("no requests in it, only a header", file=logs[0])
        share = self.rejects.count / self.read
        if share > max_rejected or self.kept == 0:
            top = self.rejects.reasons()[0]
            raise TooManyRejected(
                f"{self.rejects.count:,} of {self.read:,} rows rejected ({share:.2%}, allowed {max_rejected:.2%}); "
                f"most often: {top.reason} ({top.rows:,}x)",
                file=top.first_file,
                place=top.first_line,
                mend="mend the log, or allow more with --max-rejected" if self.kept else "mend the log",
            )

    def meta(self) -> TraceMeta:
        """What goes into the Parquet file's metadata."""
        return TraceMeta(
            source_format=self.known.name,
            block_tokens=self.known.block_tokens,
            prefix_identity=self.known.prefix_identity,
            start_utc=self._start_utc(),
            sources=tuple(self.sources),
            ingest_options=self.options,
        )

    def _start_utc(self) -> str | None:
        if not self.known.wall_clock:
            return None
        return _utc(self.first_us).isoformat()

    def _moment(self, arrival_us: int) -> str:
        """An arrival in the log's own terms."""
        return _utc(arrival_us).strftime("%F %H:%M:%S.%f") if self.known.wall_clock else f"{arrival_us / 1000:.15g} ms"

    def report(self) -> IngestReport:
        """The account, reconciled."""
        known_identity = self.known.prefix_identity != "unknown"
        reasons = tuple(self.rejects.reasons())
        rejected = sum(reason.rows for reason in reasons)
        assert rejected == self.rejects.count, "rejected rows don't add up"
        return IngestReport(
            source_format=self.known.name,
            evidence=self.evidence,
            sources=tuple(self.sources),
            rows_read=self.kept + rejected,
            rows_kept=self.kept,
            rows_rejected=rejected,
            rejected_by_reason=reasons,
            rows_reordered=self.reordered,
            span_s=(self.latest_us - self.earliest_us) / 1e6,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            distinct_arrivals=self.distinct_arrivals,
            block_tokens=self.known.block_tokens,
            distinct_blocks=self.blocks.count if known_identity else None,
            prefix_identity=self.known.prefix_identity,
            start_utc=self._start_utc(),
        )


def _utc(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def _options(format: str | None, max_rejected: float, sort: bool) -> tuple[str, ...]:
    """The command line's options that differ from their defaults."""
    options = [] if format is None else ["--log-format", format]
    if max_rejected != MAX_REJECTED:
        options += ["--max-rejected", f"{max_rejected:g}"]
    return (*options, "--sort") if sort else tuple(options)


def _identities() -> pa.Table:
    """One identity contract, none of whose fields the log names."""
    return pa.Table.from_pylist([{"identity": 0}], schema=IDENTITY_SCHEMA)
