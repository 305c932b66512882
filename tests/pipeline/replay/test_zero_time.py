"""One request at a time, in no time: the replay must equal the independent zero-time caches, block for block.

A request's ids stand for full blocks here (also the partial last one of the trace, where the oracle counts it), one token
follows so that the last block may be hit, and one block more than the oracle's capacity holds that token.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipeline.cost.attention import CONTEXT_NODES
from pipeline.cost.lowered import LoweredCost, MixedAttention
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from pipeline.trace import read_trace

LONGEST = 200_000
STEP_S = 1e-9


def next_to_nothing() -> LoweredCost:
    """A step of a nanosecond, whatever it computes."""
    nothing = np.zeros(LONGEST + 1)
    free = MixedAttention(
        launch=0.0, block=1e-30, unit=0.0, query=0.0, empty=0.0,
        longest_block=0.0, longest_unit=0.0, stall=0.0, touch=0.0, group=1.0, packs_groups=False, spill_low=1.0, spill_high=2.0,
        spilled_per_key=0.0, traffic=0.0, offset=0.0, sharpness=1.0, sms=1.0,
    )  # fmt: skip
    return LoweredCost(
        gemm=nothing + STEP_S, communication=nothing, sampling=nothing, draft_first=nothing, draft_row=nothing,
        draft_later=nothing, decode=np.zeros((4, 2, len(CONTEXT_NODES))), mixed=np.array([free] * 4), window=0.0,
        draft_window=0.0, draft_share=0.0, overhead_step=0.0, overhead_row=0.0,
    )  # fmt: skip


def hit_blocks(trace, capacity, *, full_only=False, block_tokens=512, **options):
    """Blocks hit by each request of the trace, one after the other."""
    lengths = np.diff(trace.block_offsets)
    if full_only:
        lengths = trace.input_tokens // 512
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    place = np.repeat(trace.block_offsets[:-1] - offsets[:-1], lengths) + np.arange(offsets[-1])
    tokens = lengths * 512 + 1 if not full_only else lengths * 512 // block_tokens * block_tokens + 1
    arrivals = Arrivals(
        arrival_s=trace.arrival_us / 1e6,
        input_tokens=tokens.astype(np.int32),
        output_tokens=np.ones_like(trace.output_tokens),
        block_offsets=offsets,
        block_ids=trace.block_ids[place],
        trace_block_tokens=512,
    )
    config = EngineConfig(
        replicas=1, block_tokens=block_tokens, pool_blocks=capacity + 1, max_batched_tokens=LONGEST, max_sequences=1,
        max_model_len=LONGEST, prefix_caching=True, **options,
    )  # fmt: skip
    result = replay(arrivals, config, next_to_nothing())
    assert not result.refused.any()
    return result.requests.hit_tokens // block_tokens


def sha(hits):
    return hashlib.sha256(",".join(map(str, hits.tolist())).encode()).hexdigest()


@pytest.fixture(scope="module")
def trace(conversation):
    return read_trace(conversation)


@pytest.fixture(scope="module")
def truth(expected):
    return expected["conversation_trace.jsonl"]


def test_lru_at_every_capacity_that_holds_the_longest_prompt(trace, truth):
    longest = int(np.diff(trace.block_offsets).max())
    capacities = [int(each) for each in truth["lru_curve_hit_blocks"] if int(each) >= longest]
    assert len(capacities) >= 20
    for capacity in capacities:
        assert hit_blocks(trace, capacity).sum() == truth["lru_curve_hit_blocks"][str(capacity)], capacity


def test_lfu(trace, truth):
    for capacity, policies in truth["policies"].items():
        assert sha(hit_blocks(trace, int(capacity), policy="lfu")) == policies["lfu"]["hits_sha256"], capacity


@pytest.mark.parametrize("ttl_ms", ["30000", "60000", "300000", "600000", "3600000"])
def test_time_to_live_renewed_by_use(trace, truth, ttl_ms):
    """Half a millisecond more than the limit, so that a use exactly at its end, in the log's milliseconds, still hits."""
    hits = hit_blocks(trace, 300_000, policy="lru", ttl_s=int(ttl_ms) / 1e3 + 0.0005)
    assert hits.sum() == truth["ttl_ms_refresh"][ttl_ms]["hit_blocks"]


@pytest.mark.parametrize("ttl_ms", ["60000", "300000"])
def test_time_to_live_from_the_writing(trace, truth, ttl_ms):
    """Blocks computed again beside one that is still there don't renew it: merged."""
    hits = hit_blocks(trace, 300_000, policy="fifo", ttl_s=int(ttl_ms) / 1e3 + 0.0005, merge_duplicates=True)
    assert hits.sum() == truth["ttl_ms_no_refresh"][ttl_ms]["hit_blocks"]


@pytest.mark.parametrize("block_tokens", [512, 1024, 2048, 4096])
def test_blocks_that_are_multiples_of_the_traces(trace, truth, block_tokens):
    for where, expected in truth["block_size_full_only"][str(block_tokens)].items():
        capacity = 300_000 if where == "infinite" else int(where.rsplit("_", 1)[1]) // block_tokens
        if capacity * block_tokens < int(trace.input_tokens.max()):
            continue  # the engine refuses what its pool can't hold
        hits = hit_blocks(trace, capacity, full_only=True, block_tokens=block_tokens)
        assert sha(hits) == expected["hits_sha256"], where
