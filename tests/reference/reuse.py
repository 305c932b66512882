"""Prefix reuse by brute force: a recency list, one capacity at a time. Slow and obvious."""

from __future__ import annotations


def lru_hits(prompts: list[list[int]], capacity: int) -> list[int]:
    """Blocks of the longest resident prefix of each prompt, in a zero-time LRU cache that is touched last block first."""
    recency: list[int] = []  # most recent first
    hits = []
    for prompt in prompts:
        resident = set(recency[:capacity])
        length = 0
        while length < len(prompt) and prompt[length] in resident:
            length += 1
        hits.append(length)
        for block in reversed(prompt):
            if block in recency:
                recency.remove(block)
            recency.insert(0, block)
    return hits


def unbounded_hits(prompts: list[list[int]]) -> list[int]:
    """The same with room for everything."""
    seen: set[int] = set()
    hits = []
    for prompt in prompts:
        length = 0
        while length < len(prompt) and prompt[length] in seen:
            length += 1
        hits.append(length)
        seen.update(prompt)
    return hits
