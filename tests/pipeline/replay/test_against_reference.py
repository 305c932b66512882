"""The compiled engine equals the slow one on random small traces, all features drawn together."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.pipeline.replay.support import arrivals_of, assert_equal, check_pool, engine_config_of, run_both, some_cost
from tests.reference.strategies import busy_case, busy_cases, cases

OFTEN = (
    "preemptions",
    "hit_tokens",
    "rehit_tokens",
    "recomputed_tokens",
    "trimmed_tokens",
    "accepted_tokens",
    "chunk_steps",
)
"""What a hundred crowded cases hold in at least ten."""

MANY = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@MANY
@given(cases())
def test_compiled_engine_equals_the_reference(case):
    specs, config = case
    fast, slow = run_both(specs, config)
    assert_equal(fast, slow)
    for pool in fast.pools:
        check_pool(pool)


@pytest.mark.parametrize("hundred", range(20))
def test_compiled_engine_equals_the_reference_when_busy(hundred):
    """Two thousand crowded cases. What they are for must occur in them: a case without it proves nothing."""
    seen = Counter()
    for seed in range(100 * hundred, 100 * hundred + 100):
        specs, config = busy_case(seed)
        fast, slow = run_both(specs, config)
        try:
            assert_equal(fast, slow)
            for pool in fast.pools:
                check_pool(pool)
        except AssertionError as difference:
            raise AssertionError(f"busy_case({seed}): {difference}") from difference
        for name in OFTEN:
            seen[name] += any(getattr(request, name) for request in slow.requests)
        for name in ("expired_blocks", "evicted_decode_blocks"):
            seen[name] += any(row.get(name, 0) for timeline in slow.timelines for row in timeline.values())
        seen["reply hit"] += any(
            other.hit_tokens > request.spec.input_tokens
            for request in slow.requests
            for other in slow.requests
            if request.spec.named_tokens and other.spec.block_ids and request.spec.block_ids[-1] in other.spec.block_ids
        )
        seen["evictions"] += any(replica.pool.evicted for replica in slow.replicas)
        seen["refused"] += bool(fast.refused.any())
        seen["part of a trace block hit"] += any(
            request.hit_tokens % config.trace_block_tokens for request in slow.requests
        )
    for name in (*OFTEN, "evictions"):
        assert seen[name] >= 10, seen
    for name in ("expired_blocks", "evicted_decode_blocks", "reply hit"):
        assert seen[name] >= 2, seen
    assert seen["part of a trace block hit"] >= 5, seen


def test_a_pool_that_was_used_before_is_as_new():
    """Replicas take turns with one pool; results must not depend on it. `keep_pools` gives each its own."""
    from pipeline.replay.engine import replay

    for seed in range(200):
        specs, config = busy_case(seed)
        config = dataclasses.replace(config, replicas=3)
        arrivals, engine = arrivals_of(specs, config.trace_block_tokens), engine_config_of(config, len(specs))
        shared, apart = (replay(arrivals, engine, some_cost(), keep_pools=keep) for keep in (False, True))
        for name in shared.requests._fields:
            assert np.array_equal(getattr(shared.requests, name), getattr(apart.requests, name), equal_nan=True), (
                seed,
                name,
            )


NO_DRAFTS = {"conditional_acceptance": (), "other_profiles": (), "widths": (), "slots": 0, "drafts_by": "fixed"}


@settings(max_examples=200, deadline=None)
@given(busy_cases())
def test_features_that_are_off_change_nothing(case):
    """A drafter whose drafts are never accepted, and caching without ids, emit as the plain engine does."""
    from pipeline.replay.engine import replay

    specs, config = case
    plain = dataclasses.replace(config, prefix_caching=False, drop_last_hit_block=False, **NO_DRAFTS)
    nameless = [dataclasses.replace(spec, block_ids=None) for spec in specs]
    cost = some_cost()
    base = replay(arrivals_of(specs, config.trace_block_tokens), engine_config_of(plain, len(specs)), cost)
    again = replay(arrivals_of(nameless, config.trace_block_tokens), engine_config_of(plain, len(specs)), cost)
    for name in base.requests._fields:
        assert np.array_equal(getattr(base.requests, name), getattr(again.requests, name), equal_nan=True), name
    assert base.requests.draft_tokens.sum() == 0
    assert base.requests.hit_tokens.sum() == 0


@settings(max_examples=100, deadline=None)
@given(busy_cases())
def test_same_seed_same_bytes(case):
    from pipeline.replay.engine import replay

    specs, config = case
    runs = [
        replay(arrivals_of(specs, config.trace_block_tokens), engine_config_of(config, len(specs)), some_cost())
        for _ in range(2)
    ]
    for name in runs[0].requests._fields:
        assert getattr(runs[0].requests, name).tobytes() == getattr(runs[1].requests, name).tobytes()
