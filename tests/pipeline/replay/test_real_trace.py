"""The whole conversation trace through the engine, against independent figures."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.cost.build import build_hardware
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from pipeline.replay.speculation import chain
from pipeline.trace import read_trace
from schemas.outcome import TIMELINE_COUNTERS
from schemas.study import Scenario

SCENARIO = Scenario.model_validate(
    {"fleet": {"gpu": "h100-sxm", "replicas": 4, "tensor_parallel": 4}, "model": {"name": "llama-3.1-70b"}}
)
EAGLE = {
    "method": "eagle",
    "k": 3,
    "conditional_acceptance": [0.8, 0.75, 2 / 3],
    "acceptance_source": "Dynamo's 0.8, 0.6, 0.4",
}


def run(path, *, replicas, blocks, block_tokens=512, spread_s=0.0, **more):
    trace = read_trace(path)
    scenario = (
        SCENARIO if "drafting" not in more else SCENARIO.model_validate({**SCENARIO.model_dump(), "speculation": EAGLE})
    )
    cost = build_hardware(scenario).lowered
    n = trace.arrival_us.shape[0]
    arrivals = Arrivals(
        np.arange(n) * spread_s if spread_s else trace.arrival_us / 1e6,
        trace.input_tokens, trace.output_tokens, trace.block_offsets, trace.block_ids, trace.meta.block_tokens,
    )  # fmt: skip
    config = EngineConfig(
        replicas=replicas, block_tokens=block_tokens, pool_blocks=blocks, max_batched_tokens=8192, max_sequences=256,
        max_model_len=min(131072, blocks * block_tokens), prefix_caching=True, **more,
    )  # fmt: skip
    result = replay(arrivals, config, cost)
    return trace, result


def ratio(trace, result):
    return result.requests.hit_tokens.sum() / trace.input_tokens.sum(dtype=np.int64)


@pytest.mark.parametrize(
    ("replicas", "blocks", "dynamo", "within"),
    [
        (1, 400_000, 0.3734, 0.00005),  # never full: timing has no say
        (4, 16_384, 0.1831, 0.003),
        (8, 16_384, 0.1373, 0.003),
        (4, 1_600, 0.0732, 0.012),  # small pools: which requests overlap depends on the step times
    ],
)
def test_reuse_ratio_of_nvidia_dynamo(conversation, replicas, blocks, dynamo, within):
    """NVIDIA Dynamo 1.6.1, offline replay, block 512, 8,192 batched tokens, 256 sequences, round robin, its own step times."""
    assert ratio(*run(conversation, replicas=replicas, blocks=blocks)) == pytest.approx(dynamo, abs=within)


def test_speculation_costs_reuse_as_in_nvidia_dynamo(conversation):
    """The same with MTP of 3 drafts accepted at (0.8, 0.6, 0.4): 0.1394, because a block is dropped from every hit."""
    trace, result = run(
        conversation, replicas=4, blocks=16_384, drafting=chain(0.8, 0.75, 2 / 3), drop_last_hit_block=True
    )  # fmt: skip
    assert ratio(trace, result) == pytest.approx(0.1394, abs=0.003)


@pytest.mark.parametrize("block_tokens", [512, 16])
def test_one_request_at_a_time_hits_what_the_clock_free_profile_says(conversation, block_tokens, expected):
    """The zero-time limit: arrivals so far apart that nothing overlaps, a pool that is never full."""
    trace, result = run(
        conversation, replicas=1, blocks=400_000 * 512 // block_tokens, block_tokens=block_tokens, spread_s=1e4
    )
    truth = expected["conversation_trace.jsonl"]["infinite"]
    if block_tokens == 512:
        assert result.requests.hit_tokens.sum() == truth["hit_tokens_vllm"]
    else:  # the part of a shared partial last block that fills blocks of 16 counts too
        assert truth["hit_tokens_vllm"] <= result.requests.hit_tokens.sum() <= truth["hit_tokens_cap1"]
    assert np.all(result.requests.emitted == trace.output_tokens)


def test_every_token_is_accounted_for(conversation):
    """Prompt tokens: hit once or computed; generated ones: emitted once. Nothing in between."""
    trace, result = run(conversation, replicas=4, blocks=20_000, block_tokens=16)
    served = ~result.refused
    emitted = result.requests.emitted[served]
    assert np.array_equal(emitted, np.minimum(trace.output_tokens, 20_000 * 16 - trace.input_tokens)[served])
    sums = sum(timeline.counters.sum(axis=0) for timeline in result.timelines)
    counted = dict(zip(TIMELINE_COUNTERS, sums.tolist(), strict=True))
    assert counted["arrivals"] == counted["finished"] == served.sum()
    assert counted["steps"] == result.steps.sum()
    assert counted["emitted_tokens"] == emitted.sum()
    hit, prefill, decode = counted["hit_tokens"], counted["prefill_tokens"], counted["decode_tokens"]
    assert hit == result.requests.hit_tokens.sum()
    assert counted["rehit_tokens"] == result.requests.rehit_tokens.sum()
    assert counted["preemptions"] == result.requests.preemptions.sum() > 0
    assert 0 < counted["evicted_decode_blocks"] < counted["evicted_blocks"]
    # Every token but each request's last is computed once, or hit, or computed again after a preemption (or hit again then).
    total = trace.input_tokens[served].sum(dtype=np.int64) + (emitted - 1).sum()
    assert prefill + decode >= total - hit
    assert prefill + decode <= total - hit + result.requests.recomputed_tokens.sum()
