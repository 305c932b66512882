"""One step's batch: who computes how many tokens. Follows vLLM V1's `Scheduler.schedule()`; see docs/replay.md.

`schedule` reads in two phases, running requests first, then waiting ones. It mutates the pool, the queues and the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import inlined, njit
from pipeline.replay.chains import Chains
from pipeline.replay.pool import allocate, free_blocks, lookup, register, release, shorten, touch, unheld_hits
from pipeline.replay.segments import Pool

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
    unhashed_last: bool  # unregistered freed blocks are taken after the cached ones freed before them
    long_prefill_token_threshold: int  # most tokens of one request in one step; 0 = no limit
    draft_tokens: int  # k; 0 = no speculation
    lookahead_tokens: int  # slots allocated beyond a request's scheduled tokens
    reserve_full_isl: bool  # admit only what fits as a whole, not merely its first chunk
    seed: np.uint64
    acceptance: Floats  # [k] conditional
    interval_s: float


VISIBLE_SCHEDULED, VISIBLE_STEP, VISIBLE_FINISH = range(3)


class Requests(NamedTuple):
    """All requests of the trace, one array entry each. `computed` to `draft_mark` are the engine's state."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints  # to emit, clipped at the longest sequence
    computed: Ints
    emitted: Ints
    has_drafts: NDArray[np.bool_]
    lost: Ints  # tokens that were computed when it was preempted
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
    recomputed_tokens: Ints
    preemptions: Ints
    emitting_steps: Ints
    spec_steps: Ints
    draft_tokens: Ints
    accepted_tokens: Ints
    trimmed_tokens: Ints


class Queues(NamedTuple):
    """Who waits and who runs, and what the present step does with each running one."""

    counts: NDArray[np.int64]  # [4] indexed by the constants below
    waiting: Ints  # ring buffer
    running: Ints  # in order of admission; the first SCHEDULED are in this step
    tokens: Ints  # of each running one: query tokens in this step
    drafts: Ints  # of these, drafts


WAITING_HEAD, WAITING_COUNT, RUNNING_COUNT, SCHEDULED = range(4)


def new_queues(requests: int, max_sequences: int) -> Queues:
    """Empty queues for so many requests."""
    places = max(1, min(requests, max_sequences))
    return Queues(
        counts=np.zeros(4, np.int64),
        waiting=np.empty(max(requests, 1), np.int32),
        running=np.empty(places, np.int32),
        tokens=np.zeros(places, np.int32),
        drafts=np.zeros(places, np.int32),
    )


class Batch(NamedTuple):
    """The step's make-up: the cost model's features (docs/replay.md) and what the timeline counts."""

    tokens: int
    rows: int
    sampled: int
    prefill_tokens: int
    decode_tokens: int
    prefill_pairs: int
    prefill_context: int
    decode_pairs: int
    decode_context: int
    hit_tokens: int
    preemptions: int


@njit
def push_waiting(queues: Queues, request: int) -> None:
    """To the tail of the queue. Mutates."""
    size = queues.waiting.shape[0]
    queues.waiting[(queues.counts[WAITING_HEAD] + queues.counts[WAITING_COUNT]) % size] = request
    queues.counts[WAITING_COUNT] += 1


@njit
def push_waiting_first(queues: Queues, request: int) -> None:
    """To the head of the queue. Mutates."""
    size = queues.waiting.shape[0]
    head = (queues.counts[WAITING_HEAD] - 1) % size
    queues.counts[WAITING_HEAD] = head
    queues.waiting[head] = request
    queues.counts[WAITING_COUNT] += 1


@njit
def pop_waiting(queues: Queues) -> None:
    """Drop the head of the queue. Mutates."""
    queues.counts[WAITING_HEAD] = (queues.counts[WAITING_HEAD] + 1) % queues.waiting.shape[0]
    queues.counts[WAITING_COUNT] -= 1


@njit
def blocks_for(tokens: int, settings: Settings) -> int:
    """Blocks that hold `tokens` tokens."""
    return (min(tokens, settings.max_model_len) + settings.block_tokens - 1) // settings.block_tokens


@njit
def register_final(
    settings: Settings, pool: Pool, chains: Chains, requests: Requests, request: int, final: int
) -> None:
    """Make a request's full blocks hittable, as far as its first `final` tokens go. Mutates."""
    if not settings.cache_decode_blocks:
        final = min(final, requests.input_tokens[request])
    if final >= (pool.request_registered[request] + 1) * settings.block_tokens:
        register(pool, chains, request, final // settings.block_tokens)


@njit
def preempt(
    settings: Settings, pool: Pool, requests: Requests, queues: Queues, target_sum: float, draft_sum: float
) -> int:
    """Stop the most recently admitted request, to be recomputed; it returns to the head of the queue. Mutates."""
    queues.counts[RUNNING_COUNT] -= 1
    victim = queues.running[queues.counts[RUNNING_COUNT]]
    release(pool, victim, settings.unhashed_last)
    if requests.emitted[victim] > 0:
        requests.decode_target_s[victim] += target_sum - requests.target_mark[victim]
        requests.decode_draft_s[victim] += draft_sum - requests.draft_mark[victim]
    requests.lost[victim] = max(requests.lost[victim], requests.computed[victim])
    requests.computed[victim] = 0
    requests.has_drafts[victim] = False
    requests.preemptions[victim] += 1
    push_waiting_first(queues, victim)
    return victim


@inlined
def schedule(
    settings: Settings,
    pool: Pool,
    chains: Chains,
    requests: Requests,
    queues: Queues,
    now_s: float,
    target_sum: float,
    draft_sum: float,
) -> Batch:
    """Decide one step. Mutates pool, requests and queues; returns what the cost model needs to know."""
    budget = settings.max_batched_tokens
    prefill_tokens = decode_tokens = drafts_scheduled = 0
    prefill_pairs = prefill_context = decode_pairs = decode_context = 0
    hit_tokens = preemptions = 0
    threshold = settings.long_prefill_token_threshold if settings.long_prefill_token_threshold > 0 else budget
    register_now = settings.prefix_caching and settings.visible == VISIBLE_SCHEDULED

    # Running requests, in order of admission.
    place = 0
    while place < queues.counts[RUNNING_COUNT] and budget > 0:
        request = queues.running[place]
        computed = requests.computed[request]
        total = requests.input_tokens[request] + requests.emitted[request]
        pending = total - computed
        want = pending + settings.draft_tokens if requests.has_drafts[request] else pending
        tokens = min(want, threshold, budget, settings.max_model_len - 1 - computed)
        # Most steps stay inside the blocks that are there; multiplying finds that out without two divisions per row.
        block_tokens = settings.block_tokens
        slots = min(computed + tokens + settings.lookahead_tokens, settings.max_model_len)
        if slots > pool.request_blocks[request] * block_tokens:
            needed = blocks_for(slots, settings) - pool.request_blocks[request]
            preempted_itself = False
            while needed > free_blocks(pool):
                victim = preempt(settings, pool, requests, queues, target_sum, draft_sum)
                preemptions += 1
                if victim == request:
                    preempted_itself = True
                    break
            if preempted_itself:
                break
            allocate(pool, request, needed)
        if register_now:
            register_final(settings, pool, chains, requests, request, min(computed + tokens, total))
        drafts = max(0, tokens - pending)
        queues.tokens[place] = tokens
        queues.drafts[place] = drafts
        budget -= tokens
        drafts_scheduled += drafts
        pairs = tokens * np.int64(computed) + (tokens * (tokens + 1)) // 2
        if pending == 1 and requests.emitted[request] > 0:
            decode_tokens += tokens
            decode_pairs += pairs
            decode_context += computed + tokens
        else:
            prefill_tokens += tokens
            prefill_pairs += pairs
            prefill_context += computed + tokens
        place += 1

    # Waiting requests, first come first served.
    if preemptions == 0:
        while queues.counts[WAITING_COUNT] > 0 and budget > 0 and queues.counts[RUNNING_COUNT] < settings.max_sequences:
            request = queues.waiting[queues.counts[WAITING_HEAD]]
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
            tokens = min(pending, threshold, budget)
            needed = max(0, blocks_for(computed + tokens + settings.lookahead_tokens, settings) - blocks)
            must_fit = needed
            if settings.reserve_full_isl:
                must_fit = max(needed, blocks_for(total, settings) - blocks)
            if must_fit + unheld_hits(pool, parts) > free_blocks(pool):
                break
            touch(pool, chains, request, parts)
            allocate(pool, request, needed)
            if register_now:
                register_final(settings, pool, chains, requests, request, computed + tokens)
            pop_waiting(queues)
            requests.computed[request] = computed
            if np.isnan(requests.scheduled_s[request]):
                requests.scheduled_s[request] = now_s
                requests.hit_tokens[request] = computed
                hit_tokens += computed
            else:
                requests.recomputed_tokens[request] += max(0, requests.lost[request] - computed)
                requests.lost[request] = 0
                requests.target_mark[request] = target_sum
                requests.draft_mark[request] = draft_sum
            place = queues.counts[RUNNING_COUNT]
            queues.running[place] = request
            queues.tokens[place] = tokens
            queues.drafts[place] = 0
            queues.counts[RUNNING_COUNT] += 1
            budget -= tokens
            pairs = tokens * np.int64(computed) + (tokens * (tokens + 1)) // 2
            if pending == 1 and requests.emitted[request] > 0:
                decode_tokens += tokens
                decode_pairs += pairs
                decode_context += computed + tokens
            else:
                prefill_tokens += tokens
                prefill_pairs += pairs
                prefill_context += computed + tokens
            place += 1

    queues.counts[SCHEDULED] = place
    return Batch(
        prefill_tokens + decode_tokens,
        place,
        place + drafts_scheduled,
        prefill_tokens,
        decode_tokens,
        prefill_pairs,
        prefill_context,
        decode_pairs,
        decode_context,
        hit_tokens,
        preemptions,
    )
