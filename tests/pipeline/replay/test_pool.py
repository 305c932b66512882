"""The compiled pool equals the pool of single blocks under any order of operations, also ones no scheduler would choose."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pipeline.replay import chains, segments
from pipeline.replay import pool as fast
from pipeline.replay.engine import POLICIES
from pipeline.replay.eviction import drop_first, next_expiry
from tests.pipeline.replay.support import check_pool
from tests.reference.pool import Block, KvPool


class Pair:
    """Both pools, and what each request holds in the slow one. Requests share ids as the nodes of a random tree."""

    def __init__(self, random: Random) -> None:
        self.per_id = random.choice([1, 2, 4, 7])
        self.capacity = random.randint(4, 30)
        self.requests = random.randint(2, 5)
        nodes: dict[tuple[int, int], int] = {}
        ids: list[list[int]] = []
        for _ in range(self.requests):
            parent, mine = -1, []
            for _ in range(random.randint(0, 4)):
                parent = nodes.setdefault((parent, random.choice([0, 0, 0, 1])), len(nodes))
                mine.append(parent)
            ids.append(mine)
        self.private = random.randint(0, 6)
        full = np.array([len(each) * self.per_id for each in ids], np.int32)
        self.chains = chains.Chains(
            block_ids=np.array([block for each in ids for block in each] or [0], np.uint32),
            offsets=np.concatenate([[0], np.cumsum([len(each) for each in ids])]).astype(np.int64),
            full_blocks=full,
            named_blocks=full,
            blocks_per_id=self.per_id,
            private_id=len(nodes),
        )
        self.keys = [
            [(block, j) for block in mine for j in range(self.per_id)]
            + [("private", r, j) for j in range(self.private)]
            for r, mine in enumerate(ids)
        ]
        longest = max(len(each) for each in self.keys) + 1
        policy = random.choice(["lru", "lru", "fifo", "lfu", "prefix_priority"])
        self.ttl_s = random.choice([None, 3.0, 10.0]) if policy in ("lru", "fifo") else None
        rules = {
            "priority_blocks": random.randint(0, 6),
            "unhashed_last": policy == "lru" and random.random() < 0.5,
            "merge_duplicates": random.random() < 0.4,
        }
        self.fast = fast.new_pool(
            self.capacity,
            len(nodes) + self.requests,
            self.requests,
            self.requests * longest,
            longest,
            fast.PoolRules(policy=POLICIES[policy], has_ttl=self.ttl_s is not None, **rules),
        )
        self.slow = KvPool(self.capacity, policy=policy, ttl_s=self.ttl_s, **rules)
        self.now = 0.0
        self.expired = 0
        self.held: list[list[Block] | None] = [None] * self.requests
        self.registered = [0] * self.requests

    def admit(self, request: int, most: int, drop: bool) -> None:
        hits = self.slow.lookup(self.keys[request][:most])
        parts, blocks = fast.lookup(self.fast, self.chains, request, min(most, len(self.keys[request])))
        assert blocks == len(hits)
        if drop:
            hits = hits[:-1]
            parts = fast.shorten(self.fast, parts, blocks, len(hits))
        assert fast.unheld_hits(self.fast, parts) == sum(block.refs == 0 for block in hits)
        self.slow.touch(hits)
        fast.touch(self.fast, self.chains, request, parts)
        self.held[request] = list(hits)
        self.registered[request] = len(hits)

    def grow(self, request: int, blocks: int) -> None:
        held = self.held[request]
        assert held is not None
        blocks = min(blocks, self.slow.free_blocks)
        held += self.slow.allocate(blocks)
        fast.allocate(self.fast, request, blocks, False)

    def register(self, request: int, full: int) -> None:
        held = self.held[request]
        assert held is not None
        full = min(full, len(held), len(self.keys[request]))
        if full > self.registered[request]:
            self.slow.register_from(self.registered[request], held, self.keys[request][:full], self.now)
            fast.register(self.fast, self.chains, request, full, self.now)
            self.registered[request] = full

    def release(self, request: int) -> None:
        held = self.held[request]
        assert held is not None
        self.slow.release(held, self.now)
        fast.release(self.fast, request, self.now)
        self.held[request] = None
        self.registered[request] = 0

    def pass_time(self, seconds: float) -> None:
        """With a time to live, drop what has outlived it."""
        self.now += seconds
        if self.ttl_s is None:
            return
        for block in self.slow.expired(self.now):
            self.slow.drop(block)
            self.expired += 1
        while next_expiry(self.fast, self.ttl_s) < self.now:
            drop_first(self.fast)

    def check(self) -> None:
        self.slow.check_integrity()
        check_pool(self.fast)
        assert fast.free_blocks(self.fast) == self.slow.free_blocks
        assert self.fast.totals[segments.CACHED] == self.slow.cached_blocks
        assert self.fast.totals[segments.EVICTED] == self.slow.evicted
        assert self.fast.totals[segments.EXPIRED] == self.expired
        for request in range(self.requests):
            hits = self.slow.lookup(self.keys[request])
            assert fast.lookup(self.fast, self.chains, request, len(self.keys[request]))[1] == len(hits)


@pytest.mark.parametrize("hundred", range(10))
def test_compiled_pool_equals_single_blocks(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        random = Random(seed)
        pair = Pair(random)
        try:
            for _ in range(60):
                pair.pass_time(random.choice([0.0, 1.0, 2.0]))
                request = random.randrange(pair.requests)
                if pair.held[request] is None:
                    pair.admit(request, random.choice([0, 1, 2, 3, 99, 99]), random.random() < 0.3)
                else:
                    choice = random.random()
                    if choice < 0.45:
                        pair.grow(request, random.randint(1, 5))
                    elif choice < 0.75:
                        pair.register(request, pair.registered[request] + random.randint(1, 6))
                    else:
                        pair.release(request)
                pair.check()
        except AssertionError as difference:
            raise AssertionError(f"seed {seed}: {difference}") from difference


def test_documented_vector_of_vllm():
    """vLLM's design document prefix_caching.md: 10 blocks of 4 tokens, R0 of 15 tokens, R1 of 14 (10 in common), R2 of 29.

    Expected there: R1 hits 2 blocks; R2, whose first 12 tokens are R0's, hits R0's three full blocks and evicts. With unhashed
    blocks freed to the front (vLLM since 2026-05) the free queue after both end is 6-4-7-8-9-3-2-5-1-0.
    """
    pool = KvPool(10)
    r0 = [("a", 0), ("a", 1), ("a", 2)]
    held0 = pool.allocate(4)
    for block, key in zip(held0, r0, strict=False):
        pool.register(block, key)
    assert [block.number for block in held0] == [0, 1, 2, 3]
    held0 += pool.allocate(1)  # decoding: block 3 fills up, block 4 is begun
    pool.register(held0[3], ("a", 3))
    r1 = [("a", 0), ("a", 1), ("b", 2)]
    hits = pool.lookup(r1)
    assert [block.number for block in hits] == [0, 1]
    pool.touch(hits)
    held1 = hits + pool.allocate(2)
    pool.register(held1[2], ("b", 2))
    assert [block.number for block in held1] == [0, 1, 5, 6]
    pool.release(held0)
    pool.release(held1)
    assert [block.number for block in pool.free] == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    r2 = pool.lookup([("a", 0), ("a", 1), ("a", 2), ("c", 3)])
    assert [block.number for block in r2] == [0, 1, 2]
    pool.touch(r2)
    assert [block.number for block in pool.allocate(5)] == [6, 4, 7, 8, 9]
    assert pool.evicted == 0
    pool.check_integrity()
