"""Speed of the replay loop on the conversation trace, one core: requests/s, token-steps/s, ns per token-step, memory.

A token-step is one request that emits in one step; prefill chunks that emit nothing come on top and are not counted.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import CONVERSATION, median_seconds, peak_mib, print_table
from pipeline.cost.build import build_hardware
from pipeline.ingest import ingest
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from pipeline.replay.speculation import chain
from pipeline.trace import read_trace
from pipeline.workload import transform
from schemas.study import Scenario, Workload

EAGLE = {"method": "eagle", "k": 3, "conditional_acceptance": [0.802] * 3, "acceptance_source": "benchmark"}

CASES = (
    # name, replicas, block tokens, pool blocks (None = what fits), caching, speculation
    ("4 replicas, blocks of 512, 16,384 each, caching", 4, 512, 16_384, True, False),
    ("8 replicas, the same", 8, 512, 16_384, True, False),
    ("4 replicas, the same, EAGLE k = 3", 4, 512, 16_384, True, True),
    ("11 replicas, blocks of 16, plain", 11, 16, None, False, False),
    ("11 replicas, blocks of 16, caching", 11, 16, None, True, False),
    ("11 replicas, blocks of 16, caching and EAGLE k = 3", 11, 16, None, True, True),
)

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as vLLM", {}),
    ("ITL per request", {"itl": True}),
    ("policy = fifo", {"policy": "fifo"}),
    ("policy = lfu", {"policy": "lfu"}),
    ("policy = prefix_priority, 1,024 tokens", {"policy": "prefix_priority", "priority_tokens": 1024}),
    ("ttl_s = 300", {"ttl_s": 300.0}),
    ("duplicates = merged", {"merge_duplicates": True}),
    ("scheduling = longest_prefix", {"scheduling": "longest_prefix"}),
    ("scheduling = priority", {"scheduling": "priority"}),
)
"""On 4 replicas, blocks of 512, 16,384 each, caching."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ingest([CONVERSATION], Path(folder) / "t")
        trace = read_trace(Path(folder) / "t")
    arrival_s = transform(trace.arrival_us, Workload(spread_ticks=True), 1).arrival_s
    arrivals = Arrivals(
        arrival_s,
        trace.input_tokens,
        trace.output_tokens,
        trace.block_offsets,
        trace.block_ids,
        trace.meta.block_tokens,
    )
    before = peak_mib()
    rows = []
    for name, replicas, block_tokens, blocks, caching, speculating in CASES:
        scenario = Scenario.model_validate(
            {
                "fleet": {"gpu": "h100-sxm", "replicas": replicas, "tensor_parallel": 4},
                "model": {"name": "llama-3.1-70b"},
                "engine": {"block_tokens": block_tokens},
                "speculation": EAGLE if speculating else {"method": "none"},
            }
        )
        built = build_hardware(scenario)
        pool = blocks or built.capacity.pool_blocks
        config = EngineConfig(
            replicas=replicas,
            block_tokens=block_tokens,
            pool_blocks=pool,
            max_batched_tokens=8192,
            max_sequences=256,
            max_model_len=min(131072, pool * block_tokens),
            prefix_caching=caching,
            drop_last_hit_block=caching and speculating,
            drafting=chain(0.802, 0.802, 0.802) if speculating else None,
            itl=False,
        )
        result = replay(arrivals, config, built.lowered)
        low, seconds, high = median_seconds(lambda c=config, b=built: replay(arrivals, c, b.lowered))  # type: ignore[misc]
        steps = int(result.requests.emitting_steps.sum(dtype=np.int64))
        rows.append(
            [
                name,
                f"{seconds:.3f} ({low:.3f} to {high:.3f})",
                f"{len(arrival_s) / seconds:,.0f}",
                f"{result.steps.sum():,}",
                f"{steps / seconds / 1e6:.1f} M",
                f"{seconds / steps * 1e9:.0f}",
            ]
        )
    print_table(
        "Replay of 12,031 requests, 4.1 M output tokens",
        ("case", "loop s, median (min to max)", "requests/s", "steps", "token-steps/s", "ns per token-step"),
        rows,
    )
    peak = peak_mib()
    option_table(arrivals)
    scale_rows = [scaled(arrivals, copies) for copies in (1, 10, 100)]
    print_table(
        "The trace beside itself, prefixes kept apart, 4 replicas a copy (blocks of 512, 16,384 each, caching)",
        (
            "copies",
            "requests",
            "replicas",
            "loop s",
            "requests/s",
            "steps",
            "ns per token-step",
            "peak MiB of the process",
        ),
        scale_rows,
    )
    print(f"\nPeak memory of the first table, above libraries and trace: {peak - before:.0f} MiB")


def option_table(arrivals: Arrivals) -> None:
    """What each option costs, every one alone."""
    scenario = Scenario.model_validate(
        {"fleet": {"gpu": "h100-sxm", "replicas": 4, "tensor_parallel": 4}, "model": {"name": "llama-3.1-70b"}}
    )
    lowered = build_hardware(scenario).lowered
    rows = []
    for name, options in OPTIONS:
        config = EngineConfig(
            replicas=4,
            block_tokens=512,
            pool_blocks=16_384,
            max_batched_tokens=8192,
            max_sequences=256,
            max_model_len=131072,
            prefix_caching=True,
            **{"itl": False, **options},
        )
        result = replay(arrivals, config, lowered)
        low, seconds, high = median_seconds(lambda c=config: replay(arrivals, c, lowered))  # type: ignore[misc]
        hit = result.requests.hit_tokens.sum() / arrivals.input_tokens.sum(dtype=np.int64)
        rows.append([name, f"{seconds:.3f} ({low:.3f} to {high:.3f})", f"{hit:.4f}"])
    print_table("Options, one at a time, first row of the table above", ("option", "loop s", "reuse ratio"), rows)


def scaled(arrivals: Arrivals, copies: int) -> list[str]:
    """One run of `copies` traces at once: the same arrivals, blocks numbered apart, four replicas for each copy."""
    n = arrivals.arrival_s.shape[0]
    order = np.argsort(np.tile(arrivals.arrival_s, copies), kind="stable")
    lengths = np.tile(np.diff(arrivals.block_offsets), copies)
    distinct = int(arrivals.block_ids.max()) + 1
    starts = np.repeat(arrivals.block_offsets[:-1][None, :], copies, axis=0).ravel()
    offsets = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths[order]) + np.repeat(starts[order], lengths[order])
    shift = np.repeat((order // n).astype(np.int64) * distinct, lengths[order])
    many = Arrivals(
        np.tile(arrivals.arrival_s, copies)[order],
        np.tile(arrivals.input_tokens, copies)[order],
        np.tile(arrivals.output_tokens, copies)[order],
        offsets,
        (arrivals.block_ids[places] + shift).astype(np.uint32),
        arrivals.trace_block_tokens,
    )
    del places, shift, starts, lengths, order
    config = EngineConfig(
        replicas=4 * copies,
        block_tokens=512,
        pool_blocks=16_384,
        max_batched_tokens=8192,
        max_sequences=256,
        max_model_len=131072,
        prefix_caching=True,
        itl=False,
    )
    scenario = Scenario.model_validate(
        {"fleet": {"gpu": "h100-sxm", "replicas": 4, "tensor_parallel": 4}, "model": {"name": "llama-3.1-70b"}}
    )
    lowered = build_hardware(scenario).lowered
    started = time.perf_counter()
    result = replay(many, config, lowered)
    seconds = time.perf_counter() - started
    steps = int(result.requests.emitting_steps.sum(dtype=np.int64))
    return [
        f"{copies}",
        f"{n * copies:,}",
        f"{4 * copies}",
        f"{seconds:.2f}",
        f"{n * copies / seconds:,.0f}",
        f"{result.steps.sum():,}",
        f"{seconds / steps * 1e9:.0f}",
        f"{peak_mib():.0f}",
    ]


if __name__ == "__main__":
    main()
