"""Timing a call several times, and printing a table of what came out."""

from __future__ import annotations

import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONVERSATION = ROOT / "traces/samples/mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = ROOT / "tests/data/mooncake_synthetic_trace.jsonl.gz"


def median_seconds(call: Callable[[], Any], runs: int = 5) -> tuple[float, float, float]:
    """(minimum, median, maximum) wall seconds of `call`, after one run that doesn't count."""
    call()
    taken = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken), statistics.median(taken), max(taken)


def peak_mib() -> float:
    """Most memory that this process has held, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 1024**2


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Markdown, so that a result can be pasted."""
    print(f"\n{title} ({platform.machine()}, Python {platform.python_version()})\n")
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
