"""Zero-time caches besides LRU: a provider's time to live, and the offline optimum as the upper bound of every policy.

Other orders of eviction: pipeline/reuse_eviction.py, on the heap that lives here.

All return hits per request: blocks of the longest usable prefix, [n]. `ReuseProfile.tokens_of` turns blocks into tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

Longs = NDArray[np.int64]

_NEVER = -(2**62)
_DEPTH_BITS = 20
"""A prompt has under a million blocks; the rest of a heap key is the request of the next use."""


def ttl_hits(
    offsets: Longs, ids: NDArray[np.uint32], arrival_us: Longs, ttl_us: int, *, refresh: bool = True
) -> NDArray[np.int64]:
    """An unbounded cache whose entries expire `ttl_us` after their last use (`refresh`) or after they were written.

    An entry that is used exactly `ttl_us` later is still there. This is how providers sell prefix caching (5 minutes, 1 hour).
    """
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    _ttl(offsets, ids, arrival_us, ttl_us, refresh, np.full(distinct(ids), _NEVER, np.int64), hits)
    return hits


def optimal_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """The most hits that any cache of `capacity` blocks could have, knowing the future, free not to keep a block at all.

    Every reuse is an interval between two uses of a block; at most `capacity` may overlap. Dropping the one that ends last is
    optimal for packing intervals; of those that end together the deepest goes, which keeps prefixes closed.
    """
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    following = np.full(ids.shape[0], -1, np.int64)
    _next_uses(offsets, ids, np.full(distinct(ids), -1, np.int64), following)
    until = np.full(distinct(ids), -1, np.int64)
    heap_key, heap_id = np.empty(ids.shape[0] + 1, np.int64), np.empty(ids.shape[0] + 1, np.int64)
    _optimal(offsets, ids, following, capacity, until, heap_key, heap_id, hits)
    return hits


def distinct(ids: NDArray[np.uint32]) -> int:
    """Length of an array that is indexed by block id."""
    return int(ids.max(initial=0)) + 1


@njit
def _ttl(
    offsets: Longs, ids: NDArray[np.uint32], arrival_us: Longs, ttl_us: int, refresh: bool, stamp: Longs, hits: Longs
) -> None:
    """Fill `hits`. Mutates `stamp`, the time from which each id's life counts."""
    for request in range(offsets.shape[0] - 1):
        now = arrival_us[request]
        leading = True
        for access in range(offsets[request], offsets[request + 1]):
            block = ids[access]
            alive = now - stamp[block] <= ttl_us
            leading = leading and alive
            if leading:
                hits[request] += 1
            if refresh or not alive:
                stamp[block] = now


@njit
def _next_uses(offsets: Longs, ids: NDArray[np.uint32], seen: Longs, following: Longs) -> None:
    """Fill `following`: the request that uses each access's block next, -1 = none. Mutates `seen`."""
    for request in range(offsets.shape[0] - 2, -1, -1):
        for access in range(offsets[request], offsets[request + 1]):
            following[access] = seen[ids[access]]
            seen[ids[access]] = request


@njit
def push(heap_key: Longs, heap_id: Longs, size: int, key: int | np.int64, block: np.int64) -> None:
    """Enter into the max-heap of `size` entries. Mutates."""
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if heap_key[parent] >= key:
            break
        heap_key[place], heap_id[place] = heap_key[parent], heap_id[parent]
        place = parent
    heap_key[place], heap_id[place] = key, block


@njit
def sink(heap_key: Longs, heap_id: Longs, size: int, key: int | np.int64, block: np.int64) -> None:
    """Put an entry in the place of the largest of `size` entries. Mutates."""
    place = 0
    child = 1
    while child < size:
        if child + 1 < size:
            # No branch: which child is larger is a coin flip, and would be mispredicted as often.
            child += heap_key[child + 1] > heap_key[child]
        if heap_key[child] <= key:
            break
        heap_key[place], heap_id[place] = heap_key[child], heap_id[child]
        place = child
        child = 2 * place + 1
    heap_key[place], heap_id[place] = key, block


@njit
def drop_top(heap_key: Longs, heap_id: Longs, size: int) -> None:
    """Remove the largest of `size` entries. Mutates."""
    sink(heap_key, heap_id, size - 1, heap_key[size - 1], heap_id[size - 1])


@njit
def _optimal(
    offsets: Longs,
    ids: NDArray[np.uint32],
    following: Longs,
    capacity: int,
    until: Longs,
    heap_key: Longs,
    heap_id: Longs,
    hits: Longs,
) -> None:
    """Fill `hits`. `until[id]`: heap key of the interval that is kept for it, -1 = none. Mutates all but the trace."""
    kept = 0
    size = 0
    for request in range(offsets.shape[0] - 1):
        for access in range(offsets[request], offsets[request + 1]):
            if until[ids[access]] >= 0:
                until[ids[access]] = -1
                kept -= 1
                hits[request] += 1
        for access in range(offsets[request], offsets[request + 1]):
            if following[access] < 0:
                continue
            key = (following[access] << _DEPTH_BITS) + (access - offsets[request])
            until[ids[access]] = key
            push(heap_key, heap_id, size, key, np.int64(ids[access]))
            size += 1
            kept += 1
        while kept > capacity:
            if until[heap_id[0]] == heap_key[0]:
                until[heap_id[0]] = -1
                kept -= 1
            drop_top(heap_key, heap_id, size)
            size -= 1
