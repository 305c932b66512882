"""One step's batch: who computes how many tokens. Follows vLLM V1's `Scheduler.schedule()`; see docs/replay.md.

`schedule` reads in two phases, running requests first, then waiting ones. It mutates the pool, the queues and the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.attention import TILE_KEYS, TILE_QUERIES
from pipeline.jit import inlined, njit
from pipeline.replay.chains import Chains
from pipeline.replay.pool import allocate, free_blocks, lookup, register, release, shorten, touch, unheld_hits
from pipeline.replay.segments import HAS_BLOCKS, HAS_REGISTERED, Pool
from pipeline.replay.steps import StepLog, note_silent
from pipeline.replay.waiting import (
    COUNT,
    LONGEST_PREFIX,
    PRIORITY,
    Waiting,
    pop_waiting,
    push_waiting_first,
    sort_by_prefix,
    waiting_head,
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Settings(NamedTuple):
    """One replica's engine, resolved: counts of tokens, sequences and blocks."""

    block_tokens: int
    pool_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool
    drop_last_hit_block: bool
    hit_alignment_blocks: int  # a hit is a multiple of this
    visible: int  # when a full block can be hit: VISIBLE_SCHEDULED, VISIBLE_STEP, VISIBLE_FINISH
    cache_decode_blocks: bool  # blocks with generated tokens are registered too
    ttl_s: float  # how long a free cached block lives; infinite = until it is taken
    long_prefill_token_threshold: int  # most tokens of one request in one step; 0 = no limit
    draft_tokens: int  # drafts of a row at most; 0 = no speculation
    draft_slots: int  # of the token budget that drafting takes per row
    lookahead_tokens: int  # slots allocated beyond a request's scheduled tokens
    reserve_full_isl: bool  # admit only what fits as a whole, not merely its first chunk
    interval_s: float


VISIBLE_SCHEDULED, VISIBLE_STEP, VISIBLE_FINISH = range(3)


class Requests(NamedTuple):
    """All requests of the trace, one array entry each. `computed` to `draft_mark` are the engine's state."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints  # to emit, clipped at the longest sequence
    computed: Ints
    emitted: Ints
    drafts: Ints  # drafted for its next step
    matched: NDArray[np.int8]  # whether its last draft had a match; -1 = it never drafted
    tier: Ints  # most drafts of its own, with speculation's policy ADAPTIVE; else empty
    smoothed: Floats  # drafts that it usually accepts; as `tier`
    lost: Ints  # tokens that were computed when it was preempted
    first_step: Ints  # step that emitted its first token
    silent_steps: Ints  # steps since in which it emitted nothing
    silent_from: Ints  # step in which it was preempted
    target_mark: Floats  # the replica's running sums at the last mark, see engine.py
    draft_mark: Floats
    # What the replay reports. Times in seconds; NaN where it never came to it.
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    first_output_s: Floats
    decode_draft_s: Floats
    decode_target_s: Floats
    hit_tokens: Ints
    rehit_tokens: Ints
    recomputed_tokens: Ints
    preemptions: Ints
    chunk_steps: Ints
    emitting_steps: Ints
    itl_max_s: Floats
    itl_p99_s: Floats
    spec_steps: Ints
    draft_tokens: Ints
    accepted_tokens: Ints
    trimmed_tokens: Ints


class Running(NamedTuple):
    """Who runs, and what the present step does with each."""

    counts: NDArray[np.int64]  # [2] indexed by the constants below
    requests: Ints  # in order of admission; the first SCHEDULED are in this step
    tokens: Ints  # of each: query tokens in this step
    drafts: Ints  # of these, drafts


RUNNING_COUNT, SCHEDULED = range(2)


def new_running(requests: int, max_sequences: int) -> Running:
    """Nobody, and room for so many."""
    places = max(1, min(requests, max_sequences))
    return Running(
        counts=np.zeros(2, np.int64),
        requests=np.empty(places, np.int32),
        tokens=np.zeros(places, np.int32),
        drafts=np.zeros(places, np.int32),
    )


class Batch(NamedTuple):
    """The step's make-up: the cost model's features (docs/replay.md) and what the timeline counts."""

    rows: int
    sampled: int
    decode_rows: int
    decode_tokens: int
    decode_context: int
    decode_longest: int
    prefill_rows: int
    prefill_tokens: int
    prefill_context: int
    prefill_tiles: int
    prefill_units: int
    prefill_longest: int
    tiles_most: int
    drafts: int
    hit_tokens: int
    rehit_tokens: int
    preemptions: int


@njit
def blocks_for(tokens: int, settings: Settings) -> int:
    """Blocks that hold `tokens` tokens."""
    return (min(tokens, settings.max_model_len) + settings.block_tokens - 1) // settings.block_tokens


@njit
def register_final(
    settings: Settings, pool: Pool, chains: Chains, requests: Requests, request: int, final: int, now_s: float
) -> None:
    """Make a request's full blocks hittable, as far as its first `final` tokens go. Mutates."""
    if not settings.cache_decode_blocks:
        final = min(final, requests.input_tokens[request])
    if final >= (pool.served[request, HAS_REGISTERED] + 1) * settings.block_tokens:
        register(pool, chains, request, final // settings.block_tokens, now_s)


@njit
def decodes(requests: Requests, request: int) -> bool:
    """Whether its row is a decode row: one token besides drafts, and something was emitted before."""
    pending = requests.input_tokens[request] + requests.emitted[request] - requests.computed[request]
    return bool(pending == 1 and requests.emitted[request] > 0)


@njit
def choose_victim(waiting: Waiting, running: Running) -> int:
    """The place of the running request that is preempted next: admitted last, or of the lowest priority."""
    last = running.counts[RUNNING_COUNT] - 1
    if waiting.order != PRIORITY:
        return last
    worst = last
    for place in range(last):
        if waiting.rank[running.requests[place]] > waiting.rank[running.requests[worst]]:
            worst = place
    return worst


@njit
def preempt(
    pool: Pool,
    requests: Requests,
    waiting: Waiting,
    running: Running,
    place: int,
    step: int,
    now_s: float,
    target_sum: float,
    draft_sum: float,
) -> None:
    """Stop the running request at `place`, to be recomputed; it returns to the waiting queue. Mutates."""
    victim = running.requests[place]
    last = running.counts[RUNNING_COUNT] - 1
    running.counts[RUNNING_COUNT] = last
    for after in range(place, last):
        running.requests[after] = running.requests[after + 1]
        running.tokens[after] = running.tokens[after + 1]
        running.drafts[after] = running.drafts[after + 1]
    release(pool, victim, now_s)
    if requests.emitted[victim] > 0:
        requests.decode_target_s[victim] += target_sum - requests.target_mark[victim]
        requests.decode_draft_s[victim] += draft_sum - requests.draft_mark[victim]
    requests.lost[victim] = max(requests.lost[victim], requests.computed[victim])
    requests.computed[victim] = 0
    requests.drafts[victim] = 0
    requests.preemptions[victim] += 1
    requests.silent_from[victim] = step
    push_waiting_first(waiting, victim)


@njit
def tiles_and_units(computed: int, tokens: int) -> tuple[int, int]:
    """Tiles of 64 queries that a chunk has, and blocks of 128 keys that these walk through, each up to its last query."""
    tiles = (tokens + TILE_QUERIES - 1) // TILE_QUERIES
    units = 0
    for tile in range(1, tiles + 1):
        keys = computed + min(tokens, tile * TILE_QUERIES)
        units += (keys + TILE_KEYS - 1) // TILE_KEYS
    return tiles, units


@njit
def counted_again(
    requests: Requests, running: Running, rows: int
) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int]:
    """The batch's make-up once more, after a row was taken back: the first features of `Batch` from decode_rows on, and drafts."""
    decode_rows = decode_tokens = decode_context = decode_longest = drafts = 0
    prefill_rows = prefill_tokens = prefill_context = prefill_tiles = prefill_units = prefill_longest = tiles_most = 0
    for place in range(rows):
        request, tokens = running.requests[place], running.tokens[place]
        context = requests.computed[request] + tokens
        drafts += running.drafts[place]
        if decodes(requests, request):
            decode_rows += 1
            decode_tokens += tokens
            decode_context += context
            decode_longest = max(decode_longest, context)
        else:
            tiles, units = tiles_and_units(requests.computed[request], tokens)
            prefill_rows += 1
            prefill_tokens += tokens
            prefill_context += context
            prefill_tiles += tiles
            prefill_units += units
            prefill_longest = max(prefill_longest, (context + TILE_KEYS - 1) // TILE_KEYS)
            tiles_most = max(tiles_most, tiles)
    return (
        decode_rows,
        decode_tokens,
        decode_context,
        decode_longest,
        prefill_rows,
        prefill_tokens,
        prefill_context,
        prefill_tiles,
        prefill_units,
        prefill_longest,
        tiles_most,
        drafts,
    )


@inlined
def schedule(
    settings: Settings,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    waiting: Waiting,
    running: Running,
    log: StepLog,
    step: int,
    now_s: float,
    target_sum: float,
    draft_sum: float,
) -> Batch:
    """Decide step number `step`. Mutates all but settings and chains; returns what the cost model needs to know."""
    budget, slots = settings.max_batched_tokens, settings.draft_slots
    decode_rows = decode_tokens = decode_context = decode_longest = drafts_scheduled = 0
    prefill_rows = prefill_tokens = prefill_context = prefill_tiles = prefill_units = prefill_longest = tiles_most = 0
    taken_back = False
    hit_tokens = rehit_tokens = preemptions = 0
    threshold = settings.long_prefill_token_threshold if settings.long_prefill_token_threshold > 0 else budget
    register_now = settings.prefix_caching and settings.visible == VISIBLE_SCHEDULED

    # Running requests, in order of admission.
    place = 0
    while place < running.counts[RUNNING_COUNT] and budget > slots:
        request = running.requests[place]
        computed = requests.computed[request]
        total = requests.input_tokens[request] + requests.emitted[request]
        pending = total - computed
        want = pending + requests.drafts[request]
        tokens = min(want, threshold, budget - slots, settings.max_model_len - 1 - computed)
        # Most steps stay inside the blocks that are there; multiplying finds that out without two divisions per row.
        block_tokens = settings.block_tokens
        reach = min(computed + tokens + settings.lookahead_tokens, settings.max_model_len)
        if reach > pool.served[request, HAS_BLOCKS] * block_tokens:
            needed = blocks_for(reach, settings) - pool.served[request, HAS_BLOCKS]
            preempted_itself = False
            while needed > free_blocks(pool):
                victim_place = choose_victim(waiting, running)
                if victim_place < place:  # take its row back
                    budget += running.tokens[victim_place] + slots
                    taken_back = True
                preempt(pool, requests, waiting, running, victim_place, step, now_s, target_sum, draft_sum)
                preemptions += 1
                if victim_place == place:
                    preempted_itself = True
                    break
                if victim_place < place:
                    place -= 1
            if preempted_itself:
                break
            allocate(pool, request, needed, pending == 1 and requests.emitted[request] > 0)
        if register_now:
            register_final(settings, pool, chains, requests, request, min(computed + tokens, total), now_s)
        drafts = max(0, tokens - pending)
        running.tokens[place] = tokens
        running.drafts[place] = drafts
        budget -= tokens + slots
        drafts_scheduled += drafts
        context = computed + tokens
        if pending == 1 and requests.emitted[request] > 0:
            decode_rows += 1
            decode_tokens += tokens
            decode_context += context
            decode_longest = max(decode_longest, context)
        else:
            tiles, units = tiles_and_units(computed, tokens)
            prefill_rows += 1
            prefill_tokens += tokens
            prefill_context += context
            prefill_tiles += tiles
            prefill_units += units
            prefill_longest = max(prefill_longest, (context + TILE_KEYS - 1) // TILE_KEYS)
            tiles_most = max(tiles_most, tiles)
        place += 1

    if taken_back:
        (
            decode_rows,
            decode_tokens,
            decode_context,
            decode_longest,
            prefill_rows,
            prefill_tokens,
            prefill_context,
            prefill_tiles,
            prefill_units,
            prefill_longest,
            tiles_most,
            drafts_scheduled,
        ) = counted_again(requests, running, place)

    # Waiting requests.
    if preemptions == 0:
        room = budget > slots and running.counts[RUNNING_COUNT] < settings.max_sequences
        if waiting.order == LONGEST_PREFIX and settings.prefix_caching and room:
            sort_by_prefix(waiting, pool, chains, requests.input_tokens, requests.emitted, settings.block_tokens)
        while waiting.totals[COUNT] > 0 and budget > slots and running.counts[RUNNING_COUNT] < settings.max_sequences:
            request = waiting_head(waiting)
            total = requests.input_tokens[request] + requests.emitted[request]
            parts = blocks = 0
            if settings.prefix_caching:
                parts, blocks = lookup(pool, chains, request, (total - 1) // settings.block_tokens)
                unit = settings.hit_alignment_blocks
                usable = blocks - blocks % unit
                if settings.drop_last_hit_block:
                    usable = max(0, usable - unit)
                parts = shorten(pool, parts, blocks, usable)
                blocks = usable
            computed = blocks * settings.block_tokens
            pending = total - computed
            tokens = min(pending, threshold, budget - slots)
            needed = max(0, blocks_for(computed + tokens + settings.lookahead_tokens, settings) - blocks)
            must_fit = needed
            if settings.reserve_full_isl:
                must_fit = max(needed, blocks_for(total, settings) - blocks)
            if must_fit + unheld_hits(pool, parts) > free_blocks(pool):
                break
            touch(pool, chains, request, parts)
            allocate(pool, request, needed, pending == 1 and requests.emitted[request] > 0)
            if register_now:
                register_final(settings, pool, chains, requests, request, computed + tokens, now_s)
            pop_waiting(waiting)
            requests.computed[request] = computed
            if np.isnan(requests.scheduled_s[request]):
                requests.scheduled_s[request] = now_s
                requests.hit_tokens[request] = computed
                hit_tokens += computed
            else:
                requests.rehit_tokens[request] += computed
                rehit_tokens += computed
                requests.recomputed_tokens[request] += max(0, requests.lost[request] - computed)
                if requests.emitted[request] > 0 and step > requests.silent_from[request]:
                    note_silent(log, request, requests.silent_from[request], step - 1)
                    requests.silent_steps[request] += step - requests.silent_from[request]
                requests.lost[request] = 0
                requests.target_mark[request] = target_sum
                requests.draft_mark[request] = draft_sum
            place = running.counts[RUNNING_COUNT]
            running.requests[place] = request
            running.tokens[place] = tokens
            running.drafts[place] = 0
            running.counts[RUNNING_COUNT] += 1
            budget -= tokens + slots
            context = computed + tokens
            if pending == 1 and requests.emitted[request] > 0:
                decode_rows += 1
                decode_tokens += tokens
                decode_context += context
                decode_longest = max(decode_longest, context)
            else:
                tiles, units = tiles_and_units(computed, tokens)
                prefill_rows += 1
                prefill_tokens += tokens
                prefill_context += context
                prefill_tiles += tiles
                prefill_units += units
                prefill_longest = max(prefill_longest, (context + TILE_KEYS - 1) // TILE_KEYS)
                tiles_most = max(tiles_most, tiles)
            place += 1

    running.counts[SCHEDULED] = place
    return Batch(
        place,
        place + drafts_scheduled,
        decode_rows,
        decode_tokens,
        decode_context,
        decode_longest,
        prefill_rows,
        prefill_tokens,
        prefill_context,
        prefill_tiles,
        prefill_units,
        prefill_longest,
        max(tiles_most, min(decode_rows, 1)),
        drafts_scheduled,
        hit_tokens,
        rehit_tokens,
        preemptions,
    )
