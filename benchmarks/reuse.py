"""Speed of reuse without a clock: block accesses per second, for every LRU capacity at once and for other policies at one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import CONVERSATION, SYNTHETIC, median_seconds, print_table
from pipeline.ingest import ingest
from pipeline.reuse import reuse_profile
from pipeline.reuse_eviction import POLICIES
from pipeline.reuse_policies import optimal_hits
from pipeline.trace import Trace, read_trace

CAPACITY = 10_000


def read(log: Path) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        ingest([log], Path(folder) / "t")
        return read_trace(Path(folder) / "t")


def main() -> None:
    traces = {log: read(log) for log in (CONVERSATION, SYNTHETIC)}
    every_capacity(traces)
    one_capacity(traces)


def every_capacity(traces: dict[Path, Trace]) -> None:
    rows = []
    for log, trace in traces.items():
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


def one_capacity(traces: dict[Path, Trace]) -> None:
    rows = []
    for log, trace in traces.items():
        for name, hits_of in {**POLICIES, "optimal": optimal_hits}.items():
            arguments = (trace.block_offsets, trace.block_ids, CAPACITY)
            low, median, high = median_seconds(lambda f=hits_of, a=arguments: f(*a), 9)  # type: ignore[misc]
            rows.append(
                [
                    log.name,
                    name,
                    f"{int(hits_of(*arguments).sum()):,}",
                    f"{median * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})",
                    f"{trace.block_ids.shape[0] / median / 1e6:.0f} M",
                ]
            )
    print_table(
        f"Other policies at {CAPACITY:,} blocks, one core; libCacheSim's FIFO, LFU and ARC: 4 to 12 M accesses/s (quoted)",
        ("trace", "policy", "hit blocks", "ms, median (min to max)", "accesses/s"),
        rows,
    )


if __name__ == "__main__":
    main()
