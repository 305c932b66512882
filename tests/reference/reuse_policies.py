"""Caches other than LRU by the letter of docs/reuse.md: every resident block is looked at for every eviction. Slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Resident:
    parent: int | None
    depth: int
    entered: int
    touched: int
    uses: int


# The block with the smallest value goes.
ORDERS = {
    "lru": lambda each: each.touched,
    "fifo": lambda each: each.entered,
    "fifo_leaf": lambda each: each.entered,
    "lfu": lambda each: (each.uses, each.touched),
    "length_aware": lambda each: (each.uses, -each.depth, each.touched),
}


def prefix_length(prompt, cache):
    length = 0
    while length < len(prompt) and prompt[length] in cache:
        length += 1
    return length


def policy_hits(prompts: list[list[int]], capacity: int, policy: str) -> list[int]:
    """Blocks of the longest resident prefix of each prompt.

    Then its blocks enter or are touched, last one first, one by one; each that finds the cache full takes the place of the first
    in the policy's order, never of a block of the same prompt. Of a prompt longer than the cache only the first `capacity` blocks
    take part.
    """
    if policy == "lru_root_first":
        return root_first_hits(prompts, capacity)
    cache: dict[int, Resident] = {}
    clock = 0
    hits = []
    for prompt in prompts:
        hits.append(prefix_length(prompt, cache))
        own = prompt[:capacity]
        kept = set(own)
        for depth in reversed(range(len(own))):
            block = own[depth]
            clock += 1
            if block in cache:
                cache[block].uses += 1
                cache[block].touched = clock
                continue
            if len(cache) == capacity:
                victims = [each for each in cache if each not in kept]
                if policy == "fifo_leaf":
                    parents = {each.parent for each in cache.values()}
                    victims = [each for each in victims if each not in parents]
                del cache[min(victims, key=lambda each: ORDERS[policy](cache[each]))]
            cache[block] = Resident(own[depth - 1] if depth else None, depth, clock, clock, 1)
        assert len(cache) <= capacity
        if policy != "fifo":
            assert all(each.parent is None or each.parent in cache for each in cache.values()), "prefixes are closed"
    return hits


def root_first_hits(prompts: list[list[int]], capacity: int) -> list[int]:
    """Plain LRU that touches every block of a prompt, first one first."""
    recency: list[int] = []  # most recent first
    hits = []
    for prompt in prompts:
        hits.append(prefix_length(prompt, recency))
        for block in prompt:
            if block in recency:
                recency.remove(block)
            recency.insert(0, block)
            del recency[capacity:]
    return hits
