"""Speed of ingest: MB of text and rows per second, whole calls (read, unpack, parse, number blocks, write Parquet)."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from benchmarks.measure import CONVERSATION, ROOT, median_seconds, peak_mib, print_table
from pipeline.ingest import ingest

AZURE = ROOT / "traces/samples/azure_llm_2023_conv_head.csv"
COPIES_OF_AZURE = 2_000


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jsonl = folder / "conversation.jsonl"
        jsonl.write_bytes(gzip.decompress(CONVERSATION.read_bytes()))
        header, body = AZURE.read_bytes().split(b"\n", 1)
        big = folder / "azure.csv"  # the same 500 rows over and over: one million, out of order, so sorted
        big.write_bytes(header + b"\n" + (body.rstrip(b"\n") + b"\n") * COPIES_OF_AZURE)
        for log, sort in ((CONVERSATION, False), (jsonl, False), (big, True)):
            report = ingest([log], folder / "t", sort=sort, force=True)
            size = len(gzip.decompress(log.read_bytes())) if log.suffix == ".gz" else log.stat().st_size
            low, seconds, high = median_seconds(
                lambda each=log, order=sort: ingest([each], folder / "t", sort=order, force=True),  # type: ignore[misc]
                3,
            )
            rows.append(
                [
                    log.name + (" (sorted)" if sort else ""),
                    f"{report.rows_read:,}",
                    f"{size / 1e6:.1f}",
                    f"{seconds:.3f} ({low:.3f} to {high:.3f})",
                    f"{report.rows_read / seconds / 1e6:.2f} M",
                    f"{size / seconds / 1e6:.0f}",
                ]
            )
    print_table("Ingest", ("log", "rows", "MB of text", "s, median (min to max)", "rows/s", "MB/s"), rows)
    print(f"\nPeak memory of the process: {peak_mib():.0f} MiB")


if __name__ == "__main__":
    main()
