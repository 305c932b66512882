"""In which order free blocks lose their content: the free queue of segments, by policy, and the time to live.

LRU is a linked list, as in vLLM. Every other policy is a binary heap over a key of each segment's *last* block; the blocks
before it follow with the next numbers, so that a segment's keys are a range that no other segment's key falls into. Blocks
are taken off a segment's end, so a key only ever grows.

- FIFO: the key is the block's number in order of registration, deeper blocks of one registration first.
- LFU: uses, then the block's number in order of release.
- PREFIX_PRIORITY: 1 for the first blocks of a sequence, 0 for others; then the number in order of release.
"""

from __future__ import annotations

import numpy as np

from pipeline.jit import njit
from pipeline.replay.segments import (
    BLANK,
    BLOCKS,
    CACHED,
    EVICTED,
    EVICTED_DECODE,
    EXPIRED,
    FIFO,
    HAS_TTL,
    HEAP_SIZE,
    ID,
    KEY,
    LFU,
    LRU,
    NEXT,
    NONE,
    POLICY,
    PREFIX_PRIORITY,
    PREVIOUS,
    PRIORITY_BLOCKS,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SEQUENCE,
    TAG,
    UNHASHED,
    Pool,
    recycle,
)

_USES_SHIFT = 42
_CLASS_SHIFT = 60


@njit
def join_queue(pool: Pool, segment: int, now_s: float) -> None:
    """A segment that nobody holds any more joins the free queue. Mutates."""
    if pool.totals[POLICY] != LRU:
        _join_heap(pool, segment)
        return
    if pool.totals[HAS_TTL] != 0:
        pool.stamps[segment] = now_s
    tail = pool.totals[QUEUE_TAIL]
    pool.segments[segment, PREVIOUS] = tail
    pool.segments[segment, NEXT] = NONE
    pool.totals[QUEUE_TAIL] = segment
    if tail == NONE:
        pool.totals[QUEUE_HEAD] = segment
    else:
        pool.segments[tail, NEXT] = segment


@njit
def leave_queue(pool: Pool, segment: int) -> None:
    """Take a segment out of the free queue. Mutates."""
    if pool.totals[POLICY] != LRU:
        _leave_heap(pool, segment)
        return
    before = pool.segments[segment, PREVIOUS]
    after = pool.segments[segment, NEXT]
    if before == NONE:
        pool.totals[QUEUE_HEAD] = after
    else:
        pool.segments[before, NEXT] = after
    if after == NONE:
        pool.totals[QUEUE_TAIL] = before
    else:
        pool.segments[after, PREVIOUS] = before


@njit
def _join_heap(pool: Pool, segment: int) -> None:
    """Enter with the key that the policy gives. Mutates."""
    key = pool.order[segment, TAG]
    if pool.totals[POLICY] != FIFO:
        sequence = pool.totals[SEQUENCE]
        pool.totals[SEQUENCE] = sequence + pool.segments[segment, BLOCKS]
        key = sequence + (key << _USES_SHIFT if pool.totals[POLICY] == LFU else key << _CLASS_SHIFT)
    pool.order[segment, KEY] = key
    place = pool.totals[HEAP_SIZE]
    pool.totals[HEAP_SIZE] = place + 1
    _sift_up(pool, segment, place)


@njit
def _leave_heap(pool: Pool, segment: int) -> None:
    """Take out of the heap, from wherever it stands. Mutates."""
    last = pool.totals[HEAP_SIZE] - 1
    pool.totals[HEAP_SIZE] = last
    place = pool.segments[segment, PREVIOUS]
    if place < last:
        moved = pool.heap[last]
        if pool.order[moved, KEY] < pool.order[segment, KEY]:
            _sift_up(pool, moved, place)
        else:
            _sift_down(pool, moved, place)


@njit
def _sift_up(pool: Pool, segment: int, place: int) -> None:
    """Put a segment into the heap at `place` or above. Mutates."""
    key = pool.order[segment, KEY]
    while place > 0:
        parent = (place - 1) >> 1
        other = pool.heap[parent]
        if pool.order[other, KEY] <= key:
            break
        pool.heap[place] = other
        pool.segments[other, PREVIOUS] = place
        place = parent
    pool.heap[place] = segment
    pool.segments[segment, PREVIOUS] = place


@njit
def _sift_down(pool: Pool, segment: int, place: int) -> None:
    """Put a segment into the heap at `place` or below. Mutates."""
    key = pool.order[segment, KEY]
    size = pool.totals[HEAP_SIZE]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and pool.order[pool.heap[child + 1], KEY] < pool.order[pool.heap[child], KEY]:
            child += 1
        other = pool.heap[child]
        if pool.order[other, KEY] >= key:
            break
        pool.heap[place] = other
        pool.segments[other, PREVIOUS] = place
        place = child
    pool.heap[place] = segment
    pool.segments[segment, PREVIOUS] = place


@njit
def first_in_queue(pool: Pool) -> int:
    """The segment whose last block is taken next, or NONE."""
    if pool.totals[POLICY] == LRU:
        return pool.totals[QUEUE_HEAD]
    return pool.heap[0] if pool.totals[HEAP_SIZE] > 0 else NONE


@njit
def part_in_queue(pool: Pool, segment: int, rest: int) -> None:
    """`rest` was just cut off a segment in the free queue: the end of a prefix is taken before its beginning. Mutates."""
    if pool.totals[POLICY] != LRU:
        _part_in_heap(pool, segment, rest)
        return
    before = pool.segments[segment, PREVIOUS]
    pool.segments[rest, PREVIOUS] = before
    pool.segments[rest, NEXT] = segment
    pool.segments[segment, PREVIOUS] = rest
    if before == NONE:
        pool.totals[QUEUE_HEAD] = rest
    else:
        pool.segments[before, NEXT] = rest


@njit
def _part_in_heap(pool: Pool, segment: int, rest: int) -> None:
    """The rest has the key that the segment had; the segment's comes after all of the rest's blocks. Mutates."""
    place = pool.segments[segment, PREVIOUS]
    pool.heap[place] = rest
    pool.segments[rest, PREVIOUS] = place
    pool.order[rest, KEY] = pool.order[segment, KEY]
    pool.order[segment, KEY] += pool.segments[rest, BLOCKS]
    size = pool.totals[HEAP_SIZE]
    pool.totals[HEAP_SIZE] = size + 1
    _sift_up(pool, segment, size)


@njit
def tag_part(pool: Pool, segment: int, rest: int) -> None:
    """`rest` was just cut off a segment's end: it has the segment's tag and stamp. Mutates."""
    if pool.totals[POLICY] != LRU:
        pool.order[rest, TAG] = pool.order[segment, TAG]
        if pool.totals[POLICY] == FIFO:
            pool.order[segment, TAG] += pool.segments[rest, BLOCKS]
    if pool.totals[HAS_TTL] != 0:
        pool.stamps[rest] = pool.stamps[segment]


@njit
def tag_new(pool: Pool, segment: int, block: int, after: int, now_s: float) -> None:
    """A segment was just registered: its first block is its request's `block`; `after` more of the request's follow. Mutates."""
    if pool.totals[POLICY] == FIFO:
        pool.order[segment, TAG] = pool.totals[SEQUENCE] + after
        if pool.totals[HAS_TTL] != 0:
            pool.stamps[segment] = now_s
    elif pool.totals[POLICY] == LFU:
        pool.order[segment, TAG] = 1
    elif pool.totals[POLICY] == PREFIX_PRIORITY:
        pool.order[segment, TAG] = 1 if block < pool.totals[PRIORITY_BLOCKS] else 0


@njit
def grows(pool: Pool, segment: int, block: int) -> bool:
    """Whether a segment may take on blocks that are registered later: they must stand side by side when they are free."""
    if pool.totals[POLICY] == FIFO:
        return False
    if pool.totals[POLICY] == LFU:
        return bool(pool.order[segment, TAG] == 1)
    if pool.totals[POLICY] == PREFIX_PRIORITY:
        return (pool.order[segment, TAG] == 1) == (block < pool.totals[PRIORITY_BLOCKS])
    return True


@njit
def take(pool: Pool, blocks: int, decode: bool) -> None:
    """Take `blocks` blocks out of the free queue, for a decoding row or another. Mutates; the caller knows they are there."""
    while blocks > 0:
        segment = first_in_queue(pool)
        taken = min(blocks, pool.segments[segment, BLOCKS])
        blocks -= taken
        pool.segments[segment, BLOCKS] -= taken
        if pool.segments[segment, ID] == NONE:
            pool.totals[UNHASHED] -= taken
        else:
            pool.totals[CACHED] -= taken
            pool.totals[EVICTED] += taken
            if decode:
                pool.totals[EVICTED_DECODE] += taken
        if pool.segments[segment, BLOCKS] == 0:
            leave_queue(pool, segment)
            recycle(pool, segment)
        elif pool.totals[POLICY] != LRU:
            pool.order[segment, KEY] += taken
            if pool.totals[POLICY] == FIFO:
                pool.order[segment, TAG] += taken


@njit
def next_expiry(pool: Pool, ttl_s: float) -> float:
    """When the next block's time to live ends, seconds; infinity where no block waits."""
    segment = first_in_queue(pool)
    return np.inf if segment == NONE else pool.stamps[segment] + ttl_s


@njit
def drop_first(pool: Pool) -> None:
    """The first segment of the free queue becomes blank: its time to live has ended. Mutates."""
    segment = first_in_queue(pool)
    blocks = pool.segments[segment, BLOCKS]
    pool.totals[BLANK] += blocks
    if pool.segments[segment, ID] == NONE:
        pool.totals[UNHASHED] -= blocks  # nothing is lost: it would have been taken next anyway
    else:
        pool.totals[CACHED] -= blocks
        pool.totals[EXPIRED] += blocks
    leave_queue(pool, segment)
    recycle(pool, segment)
