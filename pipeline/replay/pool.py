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

from dataclasses import dataclass

import numpy as np

from pipeline.jit import inlined, njit
from pipeline.replay.chains import Chains, locate
from pipeline.replay.eviction import grows, join_queue, leave_queue, part_in_queue, tag_new, tag_part, take
from pipeline.replay.segments import (
    BELOW,
    BLANK,
    BLOCKS,
    CACHED,
    CAPACITY,
    FIFO,
    FIRST_COPY,
    HAS_BLOCKS,
    HAS_REGISTERED,
    HAS_TTL,
    HELD_BLOCKS,
    HELD_FROM,
    HIT_BLOCKS,
    HIT_SEGMENT,
    HOLD_FREE,
    ID,
    ID_NEXT,
    ID_PREVIOUS,
    LAST_COPY,
    LFU,
    LRU,
    MERGE_DUPLICATES,
    NONE,
    POLICY,
    PREFIX_PRIORITY,
    PRIORITY_BLOCKS,
    QUEUE_HEAD,
    QUEUE_TAIL,
    REFS,
    SEGMENT_FREE,
    SEQUENCE,
    SIBLING,
    STACK,
    START,
    TAG,
    TOP_HOLD,
    UNHASHED,
    UNHASHED_LAST,
    Ints,
    Longs,
    Pool,
    new_segment,
    push_hold,
)

_FAR = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """The pool's options; see docs/replay.md."""

    policy: int = LRU
    priority_blocks: int = 0
    unhashed_last: bool = False
    merge_duplicates: bool = False
    has_ttl: bool = False


def new_pool(capacity: int, ids: int, requests: int, holds: int, longest: int, rules: PoolRules) -> Pool:
    """A pool of blank blocks. `holds`: most holds at once; `longest`: most blocks of one request."""
    totals = np.zeros(20, np.int64)
    totals[CAPACITY] = capacity
    totals[POLICY] = rules.policy
    totals[PRIORITY_BLOCKS] = rules.priority_blocks
    totals[UNHASHED_LAST] = rules.unhashed_last
    totals[MERGE_DUPLICATES] = rules.merge_duplicates
    totals[HAS_TTL] = rules.has_ttl
    _blank_totals(totals)
    ordered = 1 if rules.policy == LRU else capacity
    return Pool(
        totals=totals,
        segments=np.zeros((capacity, 9), np.int32),
        order=np.empty((ordered, 2), np.int64),
        stamps=np.zeros(capacity if rules.has_ttl else 1, np.float64),
        heap=np.empty(ordered, np.int32),
        ids=np.full((ids, 2), NONE, np.int32),
        holds=np.empty((holds, 3), np.int32),
        served=np.tile(np.array([NONE, 0, 0], np.int32), (requests, 1)),
        scratch=np.empty((longest + 1, 3), np.int32),
    )


@njit
def _blank_totals(totals: Longs) -> None:
    """Every block blank, no segment and no hold made yet. Mutates."""
    totals[BLANK:POLICY] = 0
    totals[BLANK] = totals[CAPACITY]
    totals[QUEUE_HEAD] = NONE
    totals[QUEUE_TAIL] = NONE
    totals[SEGMENT_FREE] = NONE
    totals[HOLD_FREE] = NONE


@njit
def blank_again(pool: Pool, chains: Chains, requests: Ints) -> None:
    """As new, after `requests` were served from it and have released everything. Mutates.

    Touches only their ids: making a new pool per replica would cost fleets of many replicas and ids more than the replay.
    """
    _blank_totals(pool.totals)
    for place in range(requests.shape[0]):
        request = requests[place]
        for block in range(chains.offsets[request], chains.offsets[request + 1]):
            pool.ids[chains.block_ids[block], FIRST_COPY] = NONE
            pool.ids[chains.block_ids[block], LAST_COPY] = NONE
        pool.ids[chains.private_id + request, FIRST_COPY] = NONE
        pool.ids[chains.private_id + request, LAST_COPY] = NONE


@njit
def free_blocks(pool: Pool) -> int:
    """Blocks that nobody holds, blank or cached."""
    return pool.totals[BLANK] + pool.totals[CACHED] + pool.totals[UNHASHED]


@njit
def covering(pool: Pool, key: int, block: int) -> tuple[int, int]:
    """The segment whose copy of `block` of id `key` was registered first, and up to which block that stays so.

    Where the block is not resident: NONE, and up to which block that stays so.
    """
    limit = _FAR
    segment = pool.ids[key, FIRST_COPY]
    while segment != NONE:
        start = pool.segments[segment, START]
        end = start + pool.segments[segment, BLOCKS]
        if start <= block < end:
            return segment, min(end, limit)
        if start > block:
            limit = min(limit, start)  # an older copy takes over there
        segment = pool.segments[segment, ID_NEXT]
    return NONE, limit


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
        pool.scratch[parts, HIT_SEGMENT] = segment
        pool.scratch[parts, HIT_BLOCKS] = count
        parts += 1
        matched += count
    return parts, matched


@njit
def shorten(pool: Pool, parts: int, blocks: int, wanted: int) -> int:
    """Give matched blocks back until `wanted` are left; returns the parts. Works on the lookup's scratch only."""
    while blocks > wanted:
        given = min(blocks - wanted, pool.scratch[parts - 1, HIT_BLOCKS])
        pool.scratch[parts - 1, HIT_BLOCKS] -= given
        blocks -= given
        if pool.scratch[parts - 1, HIT_BLOCKS] == 0:
            parts -= 1
    return parts


@njit
def unheld_hits(pool: Pool, parts: int) -> int:
    """Of the blocks that the last lookup found, how many nobody holds: a hit takes them out of the free blocks."""
    blocks = 0
    for part in range(parts):
        if pool.segments[pool.scratch[part, HIT_SEGMENT], REFS] == 0:
            blocks += pool.scratch[part, HIT_BLOCKS]
    return blocks


@njit
def touch(pool: Pool, chains: Chains, request: int, parts: int) -> None:
    """Hold what the last lookup found. Mutates; splits segments that are hit in part."""
    blocks = 0
    for part in range(parts):
        count = pool.scratch[part, HIT_BLOCKS]
        _, block, _ = locate(chains, request, blocks)
        segment = pool.scratch[part, HIT_SEGMENT]
        while block >= pool.segments[segment, START] + pool.segments[segment, BLOCKS]:
            segment = pool.segments[segment, SIBLING]  # an earlier part of this hit has just split it
        hold(pool, request, segment, block, count)
        blocks += count
    pool.served[request, HAS_BLOCKS] = blocks
    pool.served[request, HAS_REGISTERED] = blocks


@inlined
def hold(pool: Pool, request: int, segment: int, block: int, count: int) -> None:
    """Hold `count` blocks of a segment, from its id's `block` on. Mutates; splits it where that is a part."""
    if pool.segments[segment, START] < block:
        # The part begins inside the segment: an older copy covers what stands before.
        segment = split(pool, segment, block - pool.segments[segment, START])
    if pool.segments[segment, BLOCKS] > count:
        split(pool, segment, count)
    if pool.segments[segment, REFS] == 0:
        leave_queue(pool, segment)
        pool.totals[CACHED] -= count
    pool.segments[segment, REFS] += 1
    if pool.totals[POLICY] == LFU:
        pool.order[segment, TAG] += 1
    push_hold(pool, request, segment, count)


@njit
def split(pool: Pool, segment: int, count: int) -> int:
    """Cut a segment after `count` blocks and return the rest, in the same state and place. Mutates."""
    rest = new_segment(pool)
    pool.segments[rest, ID] = pool.segments[segment, ID]
    pool.segments[rest, START] = pool.segments[segment, START] + count
    pool.segments[rest, BLOCKS] = pool.segments[segment, BLOCKS] - count
    pool.segments[rest, REFS] = pool.segments[segment, REFS]
    pool.segments[segment, BLOCKS] = count
    pool.segments[rest, SIBLING] = pool.segments[segment, SIBLING]
    pool.segments[segment, SIBLING] = rest
    after = pool.segments[segment, ID_NEXT]
    pool.segments[segment, ID_NEXT] = rest
    pool.segments[rest, ID_PREVIOUS] = segment
    pool.segments[rest, ID_NEXT] = after
    if after == NONE:
        pool.ids[pool.segments[segment, ID], LAST_COPY] = rest
    else:
        pool.segments[after, ID_PREVIOUS] = rest
    if pool.totals[POLICY] != LRU or pool.totals[HAS_TTL] != 0:
        tag_part(pool, segment, rest)
    if pool.segments[rest, REFS] == 0:
        part_in_queue(pool, segment, rest)
    return rest


@njit
def allocate(pool: Pool, request: int, blocks: int, decode: bool) -> None:
    """Give a request `blocks` more blocks: blank ones first, then evicting. Mutates; the caller checked free_blocks."""
    blank = min(blocks, pool.totals[BLANK])
    pool.totals[BLANK] -= blank
    pool.served[request, HAS_BLOCKS] += blocks
    if blocks > blank:
        take(pool, blocks - blank, decode)


@njit
def merge(pool: Pool, request: int, key: int, place: int, count: int) -> tuple[bool, int]:
    """Hold the resident copy of `count` blocks of an id instead of the request's own, which become blank. Mutates.

    Returns whether there is one, and for how many of the blocks that is so.
    """
    segment, end = covering(pool, key, place)
    count = min(count, end - place)
    if segment == NONE:
        return False, count
    hold(pool, request, segment, place, count)
    pool.totals[BLANK] += count
    return True, count


@njit
def register(pool: Pool, chains: Chains, request: int, full: int, now_s: float) -> None:
    """Make a request's first `full` blocks hittable, those that aren't yet. Mutates; it holds at least so many."""
    first = block = pool.served[request, HAS_REGISTERED]
    pool.served[request, HAS_REGISTERED] = full
    while block < full:
        key, place, length = locate(chains, request, block)
        count = min(full - block, length - place)
        if pool.totals[POLICY] == PREFIX_PRIORITY and block < pool.totals[PRIORITY_BLOCKS]:
            count = min(count, pool.totals[PRIORITY_BLOCKS] - block)
        if pool.totals[MERGE_DUPLICATES]:
            merged, count = merge(pool, request, key, place, count)
            if merged:
                block += count
                continue
        block += count
        top = pool.served[request, TOP_HOLD]
        if top != NONE:
            segment = pool.holds[top, HELD_FROM]
            continues = (
                pool.segments[segment, ID] == key
                and pool.segments[segment, START] + pool.segments[segment, BLOCKS] == place
                and pool.segments[segment, REFS] == 1
                and pool.holds[top, HELD_BLOCKS] == pool.segments[segment, BLOCKS]
                and pool.ids[key, LAST_COPY] == segment  # no copy was registered since
                and (pool.totals[POLICY] == LRU or grows(pool, segment, block - count))
            )
            if continues:
                pool.segments[segment, BLOCKS] += count
                pool.holds[top, HELD_BLOCKS] += count
                continue
        segment = new_segment(pool)
        pool.segments[segment, ID] = key
        pool.segments[segment, START] = place
        pool.segments[segment, BLOCKS] = count
        pool.segments[segment, REFS] = 1
        pool.segments[segment, SIBLING] = NONE
        tail = pool.ids[key, LAST_COPY]
        pool.segments[segment, ID_PREVIOUS] = tail
        pool.segments[segment, ID_NEXT] = NONE
        pool.ids[key, LAST_COPY] = segment
        if tail == NONE:
            pool.ids[key, FIRST_COPY] = segment
        else:
            pool.segments[tail, ID_NEXT] = segment
        if pool.totals[POLICY] != LRU:
            tag_new(pool, segment, block - count, full - block, now_s)
        push_hold(pool, request, segment, count)
    if pool.totals[POLICY] == FIFO:
        pool.totals[SEQUENCE] += full - first


@njit
def release(pool: Pool, request: int, now_s: float) -> None:
    """Let go of all of a request's blocks, last first. Mutates.

    Its unregistered blocks become blank, or with `unhashed_last` queue up behind the cached ones.
    """
    unhashed = pool.served[request, HAS_BLOCKS] - pool.served[request, HAS_REGISTERED]
    if pool.totals[UNHASHED_LAST] and unhashed > 0:
        segment = new_segment(pool)
        pool.segments[segment, ID] = NONE
        pool.segments[segment, BLOCKS] = unhashed
        pool.segments[segment, REFS] = 0
        join_queue(pool, segment, now_s)
        pool.totals[UNHASHED] += unhashed
    else:
        pool.totals[BLANK] += unhashed
    pool.served[request, HAS_BLOCKS] = 0
    pool.served[request, HAS_REGISTERED] = 0
    top = pool.served[request, TOP_HOLD]
    pool.served[request, TOP_HOLD] = NONE
    while top != NONE:
        parts = 0
        covered = 0
        segment = pool.holds[top, HELD_FROM]
        while covered < pool.holds[top, HELD_BLOCKS]:
            pool.scratch[parts, STACK] = segment
            parts += 1
            covered += pool.segments[segment, BLOCKS]
            segment = pool.segments[segment, SIBLING]
        while parts > 0:
            parts -= 1
            segment = pool.scratch[parts, STACK]
            pool.segments[segment, REFS] -= 1
            if pool.segments[segment, REFS] == 0:
                join_queue(pool, segment, now_s)
                pool.totals[CACHED] += pool.segments[segment, BLOCKS]
        following = pool.holds[top, BELOW]
        pool.holds[top, BELOW] = pool.totals[HOLD_FREE]
        pool.totals[HOLD_FREE] = top
        top = following
