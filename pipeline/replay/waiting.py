"""Who waits, and in which order: first come first served, by priority (vLLM), or longest prefix first (SGLang).

One array serves all three: a ring of requests, or with priorities a binary heap of ranks. See docs/replay.md, 'Order of the
waiting queue'.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from pipeline.replay.chains import Chains, locate
from pipeline.replay.pool import lookup
from pipeline.replay.segments import Pool

Ints = NDArray[np.int32]

FCFS, PRIORITY, LONGEST_PREFIX = range(3)
"""`Waiting.order`."""

LPM_MOST_WAITING = 128
"""With more waiting, longest-prefix-first is first come first served: ranking them would take too long (SGLang)."""

LPM_SHARED_TOKENS = 32
"""A request that hits at most this much, and shares as much with one before it in the queue, lets that one go first (SGLang)."""

HEAD, COUNT, SORTS = range(3)


class Waiting(NamedTuple):
    """The waiting queue of one replica."""

    order: int
    most_ranked: int  # LPM_MOST_WAITING
    shared_tokens: int  # LPM_SHARED_TOKENS
    totals: Ints  # [3] place of the head, requests waiting, how often it was sorted
    queue: Ints  # ring of requests; PRIORITY: heap of ranks
    rank: Ints  # [n] PRIORITY: place of each request in the order of (priority, arrival); else [1]
    by_rank: Ints  # [n] the request of each rank; else [1]
    match: Ints  # [most_ranked] scratch: what each of the queue would hit, blocks; -1 = behind all others
    noted: Ints  # [ids] LONGEST_PREFIX: the sort in which an id was noted last; else [1]


def new_waiting(
    requests: int,
    order: int,
    priority: NDArray[np.int32] | None,
    ids: int,
    most_ranked: int = LPM_MOST_WAITING,
    shared_tokens: int = LPM_SHARED_TOKENS,
) -> Waiting:
    """An empty queue for at most `requests` requests. `priority`: of every request of the trace, the smallest first."""
    none = np.zeros(1, np.int32)
    by_rank = rank = none
    if order == PRIORITY:
        if priority is None:
            priority = np.zeros(requests, np.int32)
        by_rank = np.argsort(priority, kind="stable").astype(np.int32)  # rows are in order of arrival
        rank = np.empty(by_rank.shape[0], np.int32)
        rank[by_rank] = np.arange(by_rank.shape[0], dtype=np.int32)
    ranked = order == LONGEST_PREFIX
    return Waiting(
        order=order,
        most_ranked=most_ranked,
        shared_tokens=shared_tokens,
        totals=np.zeros(3, np.int32),
        queue=np.empty(max(requests, 1), np.int32),
        rank=rank,
        by_rank=by_rank,
        match=np.empty(most_ranked, np.int32) if ranked else none,
        noted=np.zeros(ids, np.int32) if ranked else none,
    )


@njit
def waiting_head(waiting: Waiting) -> int:
    """The request that is next. There must be one."""
    if waiting.order == PRIORITY:
        return waiting.by_rank[waiting.queue[0]]
    return waiting.queue[waiting.totals[HEAD]]


@njit
def push_waiting(waiting: Waiting, request: int) -> None:
    """A request arrives. Mutates."""
    if waiting.order == PRIORITY:
        _push_rank(waiting, waiting.rank[request])
        return
    size = waiting.queue.shape[0]
    waiting.queue[(waiting.totals[HEAD] + waiting.totals[COUNT]) % size] = request
    waiting.totals[COUNT] += 1


@njit
def push_waiting_first(waiting: Waiting, request: int) -> None:
    """A preempted request returns: to the head, or to where its priority puts it. Mutates."""
    if waiting.order == PRIORITY:
        _push_rank(waiting, waiting.rank[request])
        return
    head = (waiting.totals[HEAD] - 1) % waiting.queue.shape[0]
    waiting.totals[HEAD] = head
    waiting.queue[head] = request
    waiting.totals[COUNT] += 1


@njit
def pop_waiting(waiting: Waiting) -> None:
    """Drop the head of the queue. Mutates."""
    waiting.totals[COUNT] -= 1
    if waiting.order != PRIORITY:
        waiting.totals[HEAD] = (waiting.totals[HEAD] + 1) % waiting.queue.shape[0]
        return
    size = waiting.totals[COUNT]
    heap = waiting.queue
    rank = heap[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= rank:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = rank


@njit
def _push_rank(waiting: Waiting, rank: int) -> None:
    """Enter into the heap. Mutates."""
    heap = waiting.queue
    place = waiting.totals[COUNT]
    waiting.totals[COUNT] += 1
    while place > 0 and heap[(place - 1) >> 1] > rank:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = rank


@njit
def sort_by_prefix(
    waiting: Waiting, pool: Pool, chains: Chains, input_tokens: Ints, emitted: Ints, block_tokens: int
) -> None:
    """Longest hit first, stably; behind all others those whose prefix somebody before them is about to compute. Mutates."""
    count = waiting.totals[COUNT]
    if count < 2 or count > waiting.most_ranked:
        return
    size = waiting.queue.shape[0]
    head = waiting.totals[HEAD]
    sorting = waiting.totals[SORTS] + 1
    waiting.totals[SORTS] = sorting
    shared_blocks = (waiting.shared_tokens + block_tokens - 1) // block_tokens
    for place in range(count):
        request = waiting.queue[(head + place) % size]
        tokens = input_tokens[request] + emitted[request]
        _, match = lookup(pool, chains, request, (tokens - 1) // block_tokens)
        if match * block_tokens <= waiting.shared_tokens and tokens // block_tokens >= shared_blocks:
            key, _, _ = locate(chains, request, shared_blocks - 1)
            if waiting.noted[key] == sorting:
                match = -1
            else:
                waiting.noted[key] = sorting
        # Insert it among those before it.
        to = place
        while to > 0 and waiting.match[to - 1] < match:
            waiting.match[to] = waiting.match[to - 1]
            waiting.queue[(head + to) % size] = waiting.queue[(head + to - 1) % size]
            to -= 1
        waiting.match[to] = match
        waiting.queue[(head + to) % size] = request
