"""The step that docs/replay.md walks through, by both engines."""

from __future__ import annotations

import pytest

from tests.pipeline.replay.support import assert_equal, run_both
from tests.reference import ReferenceConfig, RequestSpec

A = RequestSpec(0.0, 8, 5, [1, 2])
B = RequestSpec(0.0, 24, 5, [3, 4, 5, 6, 7, 8])
C = RequestSpec(0.001, 11, 5, [1, 2, 9])
ENGINE = ReferenceConfig(
    replicas=1, block_tokens=4, trace_block_tokens=4, pool_blocks=12, max_batched_tokens=20, max_sequences=8,
    max_model_len=48, prefix_caching=True, interval_s=0.0001,
)  # fmt: skip


def test_the_example_is_what_happens():
    fast, slow = run_both([A, B, C], ENGINE)
    assert_equal(fast, slow)
    timeline = slow.timelines[0]
    starts = [interval for interval, row in sorted(timeline.items()) if row.get("steps")]
    first, second, third = (timeline[interval] for interval in starts[:3])
    assert (first["prefill_tokens"], first.get("decode_tokens", 0), first["emitted_tokens"]) == (20, 0, 1)
    assert (second["prefill_tokens"], second["decode_tokens"], second["emitted_tokens"]) == (15, 1, 3)
    assert (second["hit_tokens"], third["decode_tokens"], third.get("prefill_tokens", 0)) == (8, 3, 0)
    during = {name: value / ENGINE.interval_s for name, value in timeline[starts[1] + 1].items()}
    assert during["kv_used_blocks_mean"] == pytest.approx(10)
    assert (during["running_mean"], during["waiting_mean"]) == (pytest.approx(3), 0)
