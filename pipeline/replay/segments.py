"""The KV pool's arrays, and the small steps on them: segments, the free queue, the lists of an id's copies, holds.

What these make up is told in `pool`; nothing else should use them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

Ints = NDArray[np.int32]

NONE = -1

# Places in `Pool.totals`.
(
    CAPACITY,
    BLANK,  # free, without content, taken first
    CACHED,  # free, registered
    UNHASHED,  # free, without content, but waiting in the queue like the cached ones (`unhashed_last`)
    EVICTED,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SEGMENT_FREE,
    SEGMENT_NEXT,
    HOLD_FREE,
    HOLD_NEXT,
) = range(11)


class Pool(NamedTuple):
    """Structure of arrays. S = pool blocks (a segment has at least one), H = most blocks held at once, I = ids."""

    totals: NDArray[np.int64]  # [11] scalars, indexed by the constants above; blocks
    segment_id: Ints  # [S] NONE = unhashed blocks in the queue
    segment_start: Ints  # [S] first block within the id
    segment_count: Ints  # [S] blocks
    segment_refs: Ints  # [S] requests that hold it; 0 = in the free queue
    queue_next: Ints  # [S] free queue, least recently released first
    queue_prev: Ints  # [S]
    id_next: Ints  # [S] segments of one id, in order of registration; of an unused segment: next unused
    id_prev: Ints  # [S]
    sibling: Ints  # [S] the part that was split off this segment's end
    id_head: Ints  # [I]
    id_tail: Ints  # [I]
    hold_segment: Ints  # [H] a request's holds, last one first
    hold_count: Ints  # [H] blocks held from the segment on, through its siblings
    hold_next: Ints  # [H]
    request_holds: Ints  # [n] top of each request's holds
    request_blocks: Ints  # [n] blocks it holds, registered or not
    request_registered: Ints  # [n] of these, its first ones, which are registered or were hit
    hit_segment: Ints  # [scratch] what the last lookup found
    hit_count: Ints  # [scratch]
    stack: Ints  # [scratch] for walking siblings backwards


@njit
def join_queue(pool: Pool, segment: int) -> None:
    """Append to the free queue. Mutates."""
    tail = pool.totals[QUEUE_TAIL]
    pool.queue_prev[segment] = tail
    pool.queue_next[segment] = NONE
    pool.totals[QUEUE_TAIL] = segment
    if tail == NONE:
        pool.totals[QUEUE_HEAD] = segment
    else:
        pool.queue_next[tail] = segment


@njit
def leave_queue(pool: Pool, segment: int) -> None:
    """Take out of the free queue. Mutates."""
    before = pool.queue_prev[segment]
    after = pool.queue_next[segment]
    if before == NONE:
        pool.totals[QUEUE_HEAD] = after
    else:
        pool.queue_next[before] = after
    if after == NONE:
        pool.totals[QUEUE_TAIL] = before
    else:
        pool.queue_prev[after] = before


@njit
def forget(pool: Pool, segment: int) -> None:
    """Take an empty segment out of its id's list. Mutates."""
    key = pool.segment_id[segment]
    before = pool.id_prev[segment]
    after = pool.id_next[segment]
    if before == NONE:
        pool.id_head[key] = after
    else:
        pool.id_next[before] = after
    if after == NONE:
        pool.id_tail[key] = before
    else:
        pool.id_prev[after] = before


@njit
def new_segment(pool: Pool) -> int:
    """An unused segment. Mutates."""
    segment = pool.totals[SEGMENT_FREE]
    if segment != NONE:
        pool.totals[SEGMENT_FREE] = pool.id_next[segment]
        return segment
    segment = pool.totals[SEGMENT_NEXT]
    pool.totals[SEGMENT_NEXT] = segment + 1
    return segment


@njit
def push_hold(pool: Pool, request: int, segment: int, count: int) -> None:
    """Put a hold on top of a request's. Mutates."""
    hold = pool.totals[HOLD_FREE]
    if hold != NONE:
        pool.totals[HOLD_FREE] = pool.hold_next[hold]
    else:
        hold = pool.totals[HOLD_NEXT]
        pool.totals[HOLD_NEXT] = hold + 1
    pool.hold_segment[hold] = segment
    pool.hold_count[hold] = count
    pool.hold_next[hold] = pool.request_holds[request]
    pool.request_holds[request] = hold
