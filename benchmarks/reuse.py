"""Speed of the clock-free reuse curve: block accesses per second for every LRU capacity at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import CONVERSATION, SYNTHETIC, median_seconds, print_table
from pipeline.ingest import ingest
from pipeline.reuse import reuse_profile
from pipeline.trace import read_trace


def main() -> None:
    rows = []
    for log in (CONVERSATION, SYNTHETIC):
        with tempfile.TemporaryDirectory() as folder:
            ingest([log], Path(folder) / "t")
            trace = read_trace(Path(folder) / "t")
        block_tokens = trace.meta.block_tokens or 0
        arguments = (trace.block_offsets, trace.block_ids, trace.input_tokens, block_tokens)
        low, pass_s, high = median_seconds(lambda a=arguments: reuse_profile(*a), 9)  # type: ignore[misc]
        profile = reuse_profile(*arguments)
        _, curve_s, _ = median_seconds(profile.curve, 9)
        rows.append(
            [
                log.name,
                f"{profile.accesses:,}",
                f"{pass_s * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})",
                f"{profile.accesses / pass_s / 1e6:.0f} M",
                f"{curve_s * 1e3:.2f}",
                f"{profile.accesses / (pass_s + curve_s) / 1e6:.0f} M",
            ]
        )
    print_table(
        "Exact LRU hits at every capacity, one core",
        (
            "trace",
            "accesses",
            "pass ms, median (min to max)",
            "accesses/s, pass",
            "curve ms",
            "accesses/s, pass and curve",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
