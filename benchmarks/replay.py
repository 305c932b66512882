"""Speed of the replay loop on the conversation trace, one core: requests/s, token-steps/s, ns per token-step, memory.

A token-step is one request that emits in one step; prefill chunks that emit nothing come on top and are not counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import CONVERSATION, median_seconds, peak_mib, print_table
from pipeline.cost.build import build_hardware
from pipeline.ingest import ingest
from pipeline.replay.engine import Arrivals, EngineConfig, replay
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
            acceptance=(0.802,) * 3 if speculating else (),
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
    print(f"\nPeak memory above libraries and trace: {peak_mib() - before:.0f} MiB")


if __name__ == "__main__":
    main()
