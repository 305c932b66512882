"""The KV pool of one replica: which blocks are held, cached or blank, and which prefix each cached one stands for.

Semantics: docs/replay.md, 'The KV pool' (vLLM V1's block_pool.py and kv_cache_manager.py). Representation: blocks that were
registered together and are held by the same requests form one *segment*: a run of `count` consecutive blocks of one id,
starting at block `start` of that id. An id is a block of the trace (up to `trace_block_tokens / block_tokens` blocks) or a
request's private tail (any number). A hit that ends inside a segment splits it; eviction takes blocks off a segment's end.
This is exact because a request's blocks are released last first, so the blocks of a segment stand in the free queue side by
side, last one first.

Every function takes the pool's arrays; those that say "mutates" change them.
"""

from __future__ import annotations

import numpy as np

from pipeline.jit import njit
from pipeline.replay.chains import Chains, locate
from pipeline.replay.segments import (
    BLANK,
    CACHED,
    CAPACITY,
    EVICTED,
    HOLD_FREE,
    NONE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SEGMENT_FREE,
    UNHASHED,
    Ints,
    Pool,
    forget,
    join_queue,
    leave_queue,
    new_segment,
    push_hold,
)


def new_pool(capacity: int, ids: int, requests: int, holds: int, longest: int) -> Pool:
    """A pool of blank blocks. `holds`: most holds at once; `longest`: most blocks of one request."""
    totals = np.zeros(11, np.int64)
    totals[CAPACITY] = capacity
    totals[BLANK] = capacity
    totals[QUEUE_HEAD] = NONE
    totals[QUEUE_TAIL] = NONE
    totals[SEGMENT_FREE] = NONE
    totals[HOLD_FREE] = NONE
    return Pool(
        totals,
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.full(ids, NONE, np.int32),
        np.full(ids, NONE, np.int32),
        np.empty(holds, np.int32),
        np.empty(holds, np.int32),
        np.empty(holds, np.int32),
        np.full(requests, NONE, np.int32),
        np.zeros(requests, np.int32),
        np.zeros(requests, np.int32),
        np.empty(longest + 1, np.int32),
        np.empty(longest + 1, np.int32),
        np.empty(longest + 1, np.int32),
    )


@njit
def blank_again(pool: Pool, chains: Chains, requests: Ints) -> None:
    """As new, after `requests` were served from it and have released everything. Mutates.

    Touches only their ids: making a new pool per replica would cost fleets of many replicas and ids more than the replay.
    """
    capacity = pool.totals[CAPACITY]
    pool.totals[:] = 0
    pool.totals[CAPACITY] = capacity
    pool.totals[BLANK] = capacity
    pool.totals[QUEUE_HEAD] = NONE
    pool.totals[QUEUE_TAIL] = NONE
    pool.totals[SEGMENT_FREE] = NONE
    pool.totals[HOLD_FREE] = NONE
    for place in range(requests.shape[0]):
        request = requests[place]
        for block in range(chains.offsets[request], chains.offsets[request + 1]):
            pool.id_head[chains.block_ids[block]] = NONE
            pool.id_tail[chains.block_ids[block]] = NONE
        pool.id_head[chains.private_id + request] = NONE
        pool.id_tail[chains.private_id + request] = NONE


@njit
def free_blocks(pool: Pool) -> int:
    """Blocks that nobody holds, blank or cached."""
    return pool.totals[BLANK] + pool.totals[CACHED] + pool.totals[UNHASHED]


@njit
def covering(pool: Pool, key: int, block: int) -> tuple[int, int]:
    """The segment whose copy of `block` of id `key` was registered first, and up to which block that stays so.

    Returns (NONE, 0) where the block is not resident.
    """
    limit = 2**31 - 1
    segment = pool.id_head[key]
    while segment != NONE:
        start = pool.segment_start[segment]
        end = start + pool.segment_count[segment]
        if start <= block < end:
            return segment, min(end, limit)
        if start > block:
            limit = min(limit, start)  # an older copy takes over there
        segment = pool.id_next[segment]
    return NONE, 0


@njit
def lookup(pool: Pool, chains: Chains, request: int, most: int) -> tuple[int, int]:
    """The longest resident prefix of a request, at most `most` blocks: (parts, blocks). Fills hit_segment, hit_count.

    A part is a run of blocks from the start of `hit_segment` or from inside it (never touched before `touch`).
    """
    parts = 0
    matched = 0
    while matched < most:
        key, block, length = locate(chains, request, matched)
        segment, end = covering(pool, key, block)
        if segment == NONE:
            break
        count = min(end, length) - block
        count = min(count, most - matched)
        pool.hit_segment[parts] = segment
        pool.hit_count[parts] = count
        parts += 1
        matched += count
    return parts, matched


@njit
def shorten(pool: Pool, parts: int, blocks: int, wanted: int) -> int:
    """Give matched blocks back until `wanted` are left; returns the parts. Works on the lookup's scratch only."""
    while blocks > wanted:
        given = min(blocks - wanted, pool.hit_count[parts - 1])
        pool.hit_count[parts - 1] -= given
        blocks -= given
        if pool.hit_count[parts - 1] == 0:
            parts -= 1
    return parts


@njit
def unheld_hits(pool: Pool, parts: int) -> int:
    """Of the blocks that the last lookup found, how many nobody holds: a hit takes them out of the free blocks."""
    blocks = 0
    for part in range(parts):
        if pool.segment_refs[pool.hit_segment[part]] == 0:
            blocks += pool.hit_count[part]
    return blocks


@njit
def touch(pool: Pool, chains: Chains, request: int, parts: int) -> None:
    """Hold what the last lookup found. Mutates; splits segments that are hit in part."""
    blocks = 0
    for part in range(parts):
        count = pool.hit_count[part]
        _, block, _ = locate(chains, request, blocks)
        segment = pool.hit_segment[part]
        while block >= pool.segment_start[segment] + pool.segment_count[segment]:
            segment = pool.sibling[segment]  # an earlier part of this hit has just split it
        if pool.segment_start[segment] < block:
            # The part begins inside the segment: an older copy covers what stands before.
            segment = split(pool, segment, block - pool.segment_start[segment])
        if pool.segment_count[segment] > count:
            split(pool, segment, count)
        if pool.segment_refs[segment] == 0:
            leave_queue(pool, segment)
            pool.totals[CACHED] -= count
        pool.segment_refs[segment] += 1
        push_hold(pool, request, segment, count)
        blocks += count
    pool.request_blocks[request] = blocks
    pool.request_registered[request] = blocks


@njit
def split(pool: Pool, segment: int, count: int) -> int:
    """Cut a segment after `count` blocks and return the rest, in the same state and place. Mutates."""
    rest = new_segment(pool)
    pool.segment_id[rest] = pool.segment_id[segment]
    pool.segment_start[rest] = pool.segment_start[segment] + count
    pool.segment_count[rest] = pool.segment_count[segment] - count
    pool.segment_refs[rest] = pool.segment_refs[segment]
    pool.segment_count[segment] = count
    pool.sibling[rest] = pool.sibling[segment]
    pool.sibling[segment] = rest
    after = pool.id_next[segment]
    pool.id_next[segment] = rest
    pool.id_prev[rest] = segment
    pool.id_next[rest] = after
    if after == NONE:
        pool.id_tail[pool.segment_id[segment]] = rest
    else:
        pool.id_prev[after] = rest
    if pool.segment_refs[rest] == 0:  # the end of a prefix is evicted before its beginning
        before = pool.queue_prev[segment]
        pool.queue_prev[rest] = before
        pool.queue_next[rest] = segment
        pool.queue_prev[segment] = rest
        if before == NONE:
            pool.totals[QUEUE_HEAD] = rest
        else:
            pool.queue_next[before] = rest
    return rest


@njit
def allocate(pool: Pool, request: int, blocks: int) -> None:
    """Give a request `blocks` more blocks: blank ones first, then evicting. Mutates; the caller checked free_blocks."""
    blank = min(blocks, pool.totals[BLANK])
    pool.totals[BLANK] -= blank
    pool.request_blocks[request] += blocks
    missing = blocks - blank
    while missing > 0:
        segment = pool.totals[QUEUE_HEAD]
        taken = min(missing, pool.segment_count[segment])
        missing -= taken
        pool.segment_count[segment] -= taken
        if pool.segment_id[segment] == NONE:
            pool.totals[UNHASHED] -= taken
        else:
            pool.totals[CACHED] -= taken
            pool.totals[EVICTED] += taken
        if pool.segment_count[segment] == 0:
            leave_queue(pool, segment)
            if pool.segment_id[segment] != NONE:
                forget(pool, segment)
            pool.id_next[segment] = pool.totals[SEGMENT_FREE]
            pool.totals[SEGMENT_FREE] = segment


@njit
def register(pool: Pool, chains: Chains, request: int, full: int) -> None:
    """Make a request's first `full` blocks hittable (those that aren't yet). Mutates."""
    while pool.request_registered[request] < full:
        done = pool.request_registered[request]
        key, block, length = locate(chains, request, done)
        count = min(length - block, full - done)
        pool.request_registered[request] = done + count
        top = pool.request_holds[request]
        if top != NONE:
            segment = pool.hold_segment[top]
            continues = (
                pool.segment_id[segment] == key
                and pool.segment_start[segment] + pool.segment_count[segment] == block
                and pool.segment_refs[segment] == 1
                and pool.hold_count[top] == pool.segment_count[segment]
                and pool.id_tail[key] == segment  # no copy was registered since
            )
            if continues:
                pool.segment_count[segment] += count
                pool.hold_count[top] += count
                continue
        segment = new_segment(pool)
        pool.segment_id[segment] = key
        pool.segment_start[segment] = block
        pool.segment_count[segment] = count
        pool.segment_refs[segment] = 1
        pool.sibling[segment] = NONE
        tail = pool.id_tail[key]
        pool.id_prev[segment] = tail
        pool.id_next[segment] = NONE
        pool.id_tail[key] = segment
        if tail == NONE:
            pool.id_head[key] = segment
        else:
            pool.id_next[tail] = segment
        push_hold(pool, request, segment, count)


@njit
def release(pool: Pool, request: int, unhashed_last: bool) -> None:
    """Let go of all of a request's blocks, last first. Mutates.

    Its unregistered blocks become blank, or with `unhashed_last` queue up behind the cached ones.
    """
    unhashed = pool.request_blocks[request] - pool.request_registered[request]
    if unhashed_last and unhashed > 0:
        segment = new_segment(pool)
        pool.segment_id[segment] = NONE
        pool.segment_count[segment] = unhashed
        pool.segment_refs[segment] = 0
        join_queue(pool, segment)
        pool.totals[UNHASHED] += unhashed
    else:
        pool.totals[BLANK] += unhashed
    pool.request_blocks[request] = 0
    pool.request_registered[request] = 0
    hold = pool.request_holds[request]
    pool.request_holds[request] = NONE
    while hold != NONE:
        parts = 0
        covered = 0
        segment = pool.hold_segment[hold]
        while covered < pool.hold_count[hold]:
            pool.stack[parts] = segment
            parts += 1
            covered += pool.segment_count[segment]
            segment = pool.sibling[segment]
        while parts > 0:
            parts -= 1
            segment = pool.stack[parts]
            pool.segment_refs[segment] -= 1
            if pool.segment_refs[segment] == 0:
                join_queue(pool, segment)
                pool.totals[CACHED] += pool.segment_count[segment]
        following = pool.hold_next[hold]
        pool.hold_next[hold] = pool.totals[HOLD_FREE]
        pool.totals[HOLD_FREE] = hold
        hold = following
