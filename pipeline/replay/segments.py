"""The KV pool's arrays, and the small steps on them: segments, the lists of an id's copies, holds.

What these make up is told in `pool`; in which order free blocks are taken, in `eviction`. Nothing else should use them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

NONE = -1

# Places in `Pool.totals`.
(
    CAPACITY,
    BLANK,  # free, without content, taken first
    CACHED,  # free, registered
    UNHASHED,  # free, without content, but waiting in the queue like the cached ones (`UNHASHED_LAST`)
    EVICTED,  # cached blocks taken for new content
    EVICTED_DECODE,  # of these, for decoding rows
    EXPIRED,  # cached blocks dropped by their time to live
    QUEUE_HEAD,
    QUEUE_TAIL,
    HEAP_SIZE,
    SEQUENCE,  # counts blocks released (or registered, with FIFO): the order of eviction in time
    SEGMENT_FREE,
    SEGMENT_NEXT,
    HOLD_FREE,
    HOLD_NEXT,
    # The pool's rules, see docs/replay.md.
    POLICY,
    PRIORITY_BLOCKS,  # PREFIX_PRIORITY: blocks before this one of a sequence are taken last
    UNHASHED_LAST,
    MERGE_DUPLICATES,
    HAS_TTL,
) = range(20)

LRU, FIFO, LFU, PREFIX_PRIORITY = range(4)
"""`POLICY`: which cached block is taken first."""

# Columns of `Pool.segments`.
(
    ID,  # NONE = unhashed blocks in the queue
    START,  # first block within the id
    BLOCKS,  # how many; 0 = not in use
    REFS,  # requests that hold it; 0 = in the free queue
    NEXT,  # LRU: free queue, least recently released first
    PREVIOUS,  # LRU; otherwise the segment's place in the heap
    ID_NEXT,  # segments of one id, in order of registration; of an unused segment: next unused
    ID_PREVIOUS,
    SIBLING,  # the part that was split off this segment's end
) = range(9)

# Columns of `Pool.order`.
TAG, KEY = range(
    2
)  # FIFO: when its last block was registered, LFU: uses, PREFIX_PRIORITY: class; place in the order of eviction

# Columns of `Pool.ids`, `Pool.holds`, `Pool.served`, `Pool.scratch`.
FIRST_COPY, LAST_COPY = range(2)  # segments
HELD_FROM, HELD_BLOCKS, BELOW = range(3)  # first segment, blocks from there on through its siblings, the hold before
TOP_HOLD, HAS_BLOCKS, HAS_REGISTERED = range(
    3
)  # blocks it holds; of these, its first ones, which are registered or were hit
HIT_SEGMENT, HIT_BLOCKS, STACK = range(3)  # what the last lookup found; for walking siblings backwards


class Pool(NamedTuple):
    """Arrays of rows. S = pool blocks (a segment has at least one), H = most blocks held at once, I = ids.

    Rows rather than one array per field: a call that isn't inlined hands every array over, at 3 ns each.
    """

    totals: Longs  # [20] scalars, indexed by the constants above; blocks
    segments: Ints  # [S, 9]
    order: Longs  # [S, 2]; LRU: [1, 2]
    stamps: NDArray[np.float64]  # [S] from when a segment's time to live counts, seconds; [1] without one
    heap: Ints  # [S] segments in the free queue, the next to be taken on top; LRU: [1]
    ids: Ints  # [I, 2]
    holds: Ints  # [H, 3]
    served: Ints  # [n, 3] of each request
    scratch: Ints  # [most blocks of one request + 1, 3]


@njit
def forget(pool: Pool, segment: int) -> None:
    """Take an empty segment out of its id's list. Mutates."""
    key = pool.segments[segment, ID]
    before = pool.segments[segment, ID_PREVIOUS]
    after = pool.segments[segment, ID_NEXT]
    if before == NONE:
        pool.ids[key, FIRST_COPY] = after
    else:
        pool.segments[before, ID_NEXT] = after
    if after == NONE:
        pool.ids[key, LAST_COPY] = before
    else:
        pool.segments[after, ID_PREVIOUS] = before


@njit
def new_segment(pool: Pool) -> int:
    """An unused segment. Mutates."""
    segment = pool.totals[SEGMENT_FREE]
    if segment != NONE:
        pool.totals[SEGMENT_FREE] = pool.segments[segment, ID_NEXT]
        return segment
    segment = pool.totals[SEGMENT_NEXT]
    pool.totals[SEGMENT_NEXT] = segment + 1
    return segment


@njit
def recycle(pool: Pool, segment: int) -> None:
    """Give an empty segment, which is in no queue, back for `new_segment`. Mutates."""
    if pool.segments[segment, ID] != NONE:
        forget(pool, segment)
    pool.segments[segment, BLOCKS] = 0
    pool.segments[segment, ID_NEXT] = pool.totals[SEGMENT_FREE]
    pool.totals[SEGMENT_FREE] = segment


@njit
def push_hold(pool: Pool, request: int, segment: int, count: int) -> None:
    """Put a hold on top of a request's. Mutates."""
    hold = pool.totals[HOLD_FREE]
    if hold != NONE:
        pool.totals[HOLD_FREE] = pool.holds[hold, BELOW]
    else:
        hold = pool.totals[HOLD_NEXT]
        pool.totals[HOLD_NEXT] = hold + 1
    pool.holds[hold, HELD_FROM] = segment
    pool.holds[hold, HELD_BLOCKS] = count
    pool.holds[hold, BELOW] = pool.served[request, TOP_HOLD]
    pool.served[request, TOP_HOLD] = hold
