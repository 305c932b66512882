"""Zero-time caches of one size under other policies than LRU: what another order of eviction would hit.

All work alike. A request hits the longest prefix that is resident when it arrives. Then all its blocks are touched or enter, last
one first; a block that enters a full cache takes the place of the first in the policy's order, never of a block of the same
prompt. Of a prompt longer than the cache only the first `capacity` blocks take part. (LRU under these rules is the curve of
pipeline/reuse.py.) Victims aren't of the prompt, so their order doesn't change while it enters: kernels evict all of a request's
victims first.

All take a capacity of 0 or more blocks and return hits per request: blocks of the longest usable prefix, [n].
`ReuseProfile.tokens_of` turns blocks into tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from pipeline.reuse_policies import Longs, distinct, drop_top, push, sink
from schemas.errors import InputError

Policy = Callable[[Longs, NDArray[np.uint32], int], Longs]


def fifo_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """First in, first out: what entered longest ago goes, used since or not. Blocks whose prefix is gone keep their place."""
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    blocks = distinct(ids)
    resident, owner = np.zeros(blocks, np.bool_), np.full(blocks, -1, np.int64)
    _fifo(offsets, ids, capacity, resident, owner, np.full(blocks + 1, -1, np.int64), hits)
    return hits


def fifo_leaf_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """First in, first out among the blocks that no resident prompt extends, so that prefixes stay whole."""
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    blocks = distinct(ids)
    room = min(blocks, capacity) + 1
    _fifo_leaf(
        offsets,
        ids,
        capacity,
        np.full(blocks, -1, np.int64),
        np.full(blocks, -1, np.int64),
        np.zeros(blocks, np.int64),
        np.zeros(blocks, np.bool_),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        hits,
    )
    return hits


def lfu_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """Least frequently used: fewest uses since it entered, then least recently used. What returns counts from one again."""
    # Touched last one first: within a request the access number runs backwards.
    touch = np.repeat(offsets[:-1] + offsets[1:] - 1, np.diff(offsets)) - np.arange(ids.shape[0])
    return _frequency_hits(offsets, ids, capacity, ids.shape[0] - 1 - touch)


def length_aware_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """Mooncake's LengthAware: like LFU, but of equally many uses the block deepest in its prompt goes, then the least recent.

    Their report (arXiv 2407.00079, section 4.2) has half a sentence on it: like LFU, with regard to where in a request a block is.
    This reading is ours.
    """
    requests = offsets.shape[0] - 1
    lengths = np.diff(offsets)
    depth = np.arange(ids.shape[0]) - np.repeat(offsets[:-1], lengths)
    return _frequency_hits(offsets, ids, capacity, depth * requests + np.repeat(np.arange(requests)[::-1], lengths))


def lru_root_first_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int) -> NDArray[np.int64]:
    """LRU that touches the first block first, so that a prefix goes before what extends it: as caches of plain keys do.

    Plain LRU to the letter: a prompt longer than the cache pushes its own beginning out.
    """
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    _lru_root_first(offsets, ids, capacity, np.full(distinct(ids), -1, np.int64), hits)
    return hits


POLICIES: Mapping[str, Policy] = {
    "fifo": fifo_hits,
    "fifo_leaf": fifo_leaf_hits,
    "lfu": lfu_hits,
    "length_aware": length_aware_hits,
    "lru_root_first": lru_root_first_hits,
}
"""By the name that `preplay reuse --policy` takes."""


def policy(name: str) -> Policy:
    """The policy of that name. Raises InputError, which lists the known ones."""
    if name not in POLICIES:
        raise InputError(f"unknown policy '{name}'", mend=f"known: {', '.join(sorted(POLICIES))}; LRU is always shown")
    return POLICIES[name]


def _frequency_hits(offsets: Longs, ids: NDArray[np.uint32], capacity: int, rank: Longs) -> Longs:
    """Hits where the fewest uses go first, and of those the largest `rank`, [m], as it was at the last use.

    Raises InputError where uses and ranks together don't fit 63 bits: millions of requests that share one block.
    """
    hits = np.zeros(offsets.shape[0] - 1, np.int64)
    blocks = distinct(ids)
    most = int(np.bincount(ids, minlength=1).max())
    span = int(rank.max(initial=0)) + 1
    if (most + 1) * span >= 2**63:
        raise InputError("too many requests for a count of uses", mend="profile a part of the log")
    room = min(blocks, capacity) + 1
    _frequency(
        offsets,
        ids,
        capacity,
        rank,
        most * span,
        span,
        np.full(blocks, -1, np.int64),
        np.empty(blocks, np.int64),
        np.full(blocks, -1, np.int64),
        np.zeros(blocks, np.bool_),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        hits,
    )
    return hits


@njit
def _fifo(
    offsets: Longs,
    ids: NDArray[np.uint32],
    capacity: int,
    resident: NDArray[np.bool_],
    owner: Longs,
    newer: Longs,
    hits: Longs,
) -> None:
    """Fill `hits`. `newer`: what entered next, a list that starts after the last element. Mutates all but the trace."""
    start = newer.shape[0] - 1
    newest = start
    size = 0
    for request in range(offsets.shape[0] - 1):
        begin, end = offsets[request], offsets[request + 1]
        while hits[request] < end - begin and resident[ids[begin + hits[request]]]:
            hits[request] += 1
        end = min(end, begin + capacity)
        for access in range(begin, end):
            owner[ids[access]] = request
            if not resident[ids[access]]:
                size += 1
        before = start
        while size > capacity:
            block = newer[before]
            if owner[block] == request:
                before = block
                continue
            newer[before] = newer[block]
            if newest == block:
                newest = before
            resident[block] = False
            size -= 1
        for access in range(end - 1, begin - 1, -1):
            if not resident[ids[access]]:
                resident[ids[access]] = True
                newer[newest] = ids[access]
                newest = np.int64(ids[access])
                newer[newest] = -1


@njit
def _fifo_leaf(
    offsets: Longs,
    ids: NDArray[np.uint32],
    capacity: int,
    key: Longs,
    parent: Longs,
    children: Longs,
    listed: NDArray[np.bool_],
    heap_key: Longs,
    heap_id: Longs,
    hits: Longs,
) -> None:
    """Fill `hits`. `key`: larger = entered earlier, -1 = not resident; the heap lists every leaf. Mutates all but the trace."""
    size = 0
    heap = 0
    oldest = ids.shape[0]
    for request in range(offsets.shape[0] - 1):
        begin, end = offsets[request], offsets[request + 1]
        while hits[request] < end - begin and key[ids[begin + hits[request]]] >= 0:
            hits[request] += 1
        end = min(end, begin + capacity)
        # Prefixes are whole: what did not hit isn't there. It enters first, so that only its last block can be a leaf.
        for access in range(end - 1, begin + hits[request] - 1, -1):
            block = ids[access]
            key[block] = oldest
            oldest -= 1
            size += 1
            if access > begin:
                parent[block] = ids[access - 1]
                children[ids[access - 1]] += 1
        while size > capacity:
            block = heap_id[0]
            heap -= 1
            drop_top(heap_key, heap_id, heap + 1)
            listed[block] = False
            if children[block] > 0:
                continue
            key[block] = -1
            size -= 1
            above = parent[block]
            if above >= 0:
                children[above] -= 1
                if children[above] == 0 and not listed[above]:
                    listed[above] = True
                    push(heap_key, heap_id, heap, key[above], above)
                    heap += 1
        if end > begin and children[ids[end - 1]] == 0 and not listed[ids[end - 1]]:
            listed[ids[end - 1]] = True
            push(heap_key, heap_id, heap, key[ids[end - 1]], np.int64(ids[end - 1]))
            heap += 1


@njit
def _frequency(
    offsets: Longs,
    ids: NDArray[np.uint32],
    capacity: int,
    rank: Longs,
    unused: int,
    span: int,
    key: Longs,
    left: Longs,
    owner: Longs,
    listed: NDArray[np.bool_],
    heap_key: Longs,
    heap_id: Longs,
    hits: Longs,
) -> None:
    """Fill `hits`. Mutates all arrays but the trace and `rank`.

    `key`: larger = goes sooner, -1 = not resident. It is `left` + rank; `left` is `unused` when a block enters, and each use takes
    `span` off. So keys only fall, and a block that is used stays where it is in the heap until it comes up, and is put in its
    place then.
    """
    size = 0
    heap = 0
    for request in range(offsets.shape[0] - 1):
        begin, end = offsets[request], offsets[request + 1]
        while hits[request] < end - begin and key[ids[begin + hits[request]]] >= 0:
            hits[request] += 1
        end = min(end, begin + capacity)
        size += max(0, end - begin - hits[request])
        if size > capacity:
            for access in range(begin, end):
                owner[ids[access]] = request
        while size > capacity:
            block = heap_id[0]
            if owner[block] != request and heap_key[0] != key[block]:
                sink(heap_key, heap_id, heap, key[block], block)
                continue
            heap -= 1
            drop_top(heap_key, heap_id, heap + 1)
            listed[block] = False
            if owner[block] != request:
                key[block] = -1
                size -= 1
        for access in range(begin, end):
            block = ids[access]
            left[block] = (unused if key[block] < 0 else left[block]) - span
            key[block] = left[block] + rank[access]
            if not listed[block]:
                listed[block] = True
                push(heap_key, heap_id, heap, key[block], np.int64(block))
                heap += 1


@njit
def _lru_root_first(offsets: Longs, ids: NDArray[np.uint32], capacity: int, touched: Longs, hits: Longs) -> None:
    """Fill `hits`. Mutates `touched`, the access that used a block last, -1 = not resident.

    The accesses themselves are the recency list: the oldest that is still its block's latest is the victim.
    """
    size = 0
    oldest = 0
    for request in range(offsets.shape[0] - 1):
        begin, end = offsets[request], offsets[request + 1]
        while hits[request] < end - begin and touched[ids[begin + hits[request]]] >= 0:
            hits[request] += 1
        for access in range(begin, end):
            if touched[ids[access]] < 0:
                size += 1
            touched[ids[access]] = access
            while size > capacity:
                if touched[ids[oldest]] == oldest:
                    touched[ids[oldest]] = -1
                    size -= 1
                oldest += 1
