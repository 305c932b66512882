"""Slow, plain re-implementations of docs/replay.md and of reuse, used as oracles.

Here: what the reference engine is told (a trace's request, a configuration), the request as it is served and what it
reports, its luck. The pool is in `pool.py`, the engine in `engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, log1p, prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.reference.pool import Block

Key = tuple[object, ...]

MASK = 2**64 - 1

LPM_MOST_WAITING = 128  # with more, longest_prefix is fcfs
LPM_SHARED_TOKENS = 32  # who would hit at most these waits for another that begins with the same ones


def mix(value: int) -> int:
    """SplitMix64's output for the state `value`."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, request: int, position: int) -> float:
    """The luck of one output position, in [0, 1): `u` of docs/replay.md."""
    return (mix(mix(mix(seed) ^ request) ^ position) >> 11) / 2**53


def match(config: ReferenceConfig, request: int, position: int, matched: bool | None, most: int) -> int:
    """How many of `most` drafts there are for the token at an output position: as many as the text that matched goes on."""
    if config.hit_after_hit is None:
        return most
    hit, miss = config.hit_after_hit, config.hit_after_miss
    in_the_long_run = miss / (1 - hit + miss) if (hit, miss) != (1, 0) else 1.0
    chance = {None: in_the_long_run, True: hit, False: miss}[matched]
    if uniform(config.seed ^ 0x6D61746368, request, position) >= chance:
        return 0
    if config.match_tokens <= 1:
        return most
    left = uniform(config.seed ^ 0x6C656E677468, request, position)
    return min(most, 1 + floor(log1p(-left) / log1p(-1 / config.match_tokens)))


@dataclass
class RequestSpec:
    """One request of a trace; `block_ids` None = identity unknown. The ids name the first `named_tokens` tokens: None = the
    prompt, or as much of it as there are ids for."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int] | None
    priority: int = 0
    named_tokens: int | None = None


def block_keys(request: int, spec: RequestSpec, block_tokens: int, trace_block_tokens: int, tokens: int) -> list[Key]:
    """Keys of the full blocks among a request's first `tokens` tokens: as far as the trace names them, then its own."""
    b, t = block_tokens, trace_block_tokens
    ids = spec.block_ids or []
    named = spec.input_tokens if spec.named_tokens is None else spec.named_tokens
    named = min(named, len(ids) * t)
    keys: list[Key]
    if t % b == 0:
        keys = [("trace", ids[j * b // t], j * b % t // b) for j in range(named // b)]
    else:  # ids name everything before them, so the last one in an engine block names all of it
        keys = [("trace", ids[(j + 1) * b // t - 1]) for j in range(named // t * t // b)]
    return (keys + [("own", request, j) for j in range(len(keys), tokens // b)])[: tokens // b]


@dataclass
class ReferenceConfig:
    """One engine, and how many of it. Without `draft_tokens`, k is the number of acceptance rates; without
    `lookahead_tokens`, that many are k. `max_model_len` is M, resolved; `priority_blocks` the full blocks among the first
    `priority_tokens` tokens."""

    replicas: int
    block_tokens: int
    trace_block_tokens: int
    pool_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool = False
    drop_last_hit_block: bool = False
    draft_tokens: int | None = None
    lookahead_tokens: int | None = None
    reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    hit_alignment_blocks: int = 1
    visible: str = "scheduled"
    cache_decode_blocks: bool = True
    unhashed_last: bool = False
    scheduling: str = "fcfs"
    lpm_most_waiting: int = LPM_MOST_WAITING
    lpm_shared_tokens: int = LPM_SHARED_TOKENS
    policy: str = "lru"
    priority_blocks: int = 0
    ttl_s: float | None = None
    merge_duplicates: bool = False
    conditional_acceptance: tuple[float, ...] = ()  # of each level, given all before it
    other_profiles: tuple[tuple[float, ...], ...] = ()  # requests take turns with these
    widths: tuple[int, ...] = ()  # a tree's nodes by level; () = a chain
    slots: int = 0  # of the token budget, per scheduled row
    drafts_by: str = "fixed"  # by_batch, goodput, adaptive
    k_by_batch: tuple[tuple[int, int, int], ...] = ()  # from rows, to rows, drafts
    tiers: tuple[int, ...] = (1, 3, 7)
    first_tier: int = 3
    hit_after_hit: float | None = None  # None = there is always something to draft
    hit_after_miss: float = 0.0
    match_tokens: float = 0.0
    seed: int = 1
    interval_s: float = 10.0

    @property
    def k(self) -> int:
        """Drafts of a row at most."""
        if self.draft_tokens is not None:
            return self.draft_tokens
        return sum(self.widths) if self.widths else len(self.conditional_acceptance)

    def levels(self, drafts: int) -> int:
        """Whole levels among so many drafts."""
        widths = self.widths or (1,) * len(self.conditional_acceptance)
        return max(level for level in range(len(widths) + 1) if sum(widths[:level]) <= drafts)

    def rates(self, request: int) -> tuple[float, ...]:
        """The acceptance of a request's drafts by level."""
        return ((self.conditional_acceptance, *self.other_profiles))[request % (1 + len(self.other_profiles))]

    def expected(self, drafts: int) -> float:
        """Tokens per step and row, the mean over profiles."""
        profiles = (self.conditional_acceptance, *self.other_profiles)
        each = [sum(prod(rates[: i + 1]) for i in range(self.levels(drafts))) for rates in profiles]
        return 1.0 + sum(each) / len(each)

    @property
    def lookahead(self) -> int:
        return self.k if self.lookahead_tokens is None else self.lookahead_tokens

    def check(self) -> None:
        """An engine that can run every request it accepts."""
        b, t = self.block_tokens, self.trace_block_tokens
        assert t % b == 0 or b % t == 0, "block sizes that don't divide each other"
        assert self.scheduling in ("fcfs", "priority", "longest_prefix")
        assert self.policy in ("lru", "fifo", "lfu", "prefix_priority")
        assert self.policy == "lru" or not self.unhashed_last, "unhashed_last with a policy that is not lru"
        assert self.policy in ("lru", "fifo") or self.ttl_s is None, "a time to live without a stamp"
        assert self.max_model_len <= self.pool_blocks * self.block_tokens, "M is more than the pool holds"
        assert min(self.replicas, self.max_batched_tokens, self.max_sequences, self.interval_s) > 0
        assert self.widths or len(self.conditional_acceptance) >= self.k, "an acceptance rate for every draft"
        assert not self.widths or len(self.widths) == len(self.conditional_acceptance), "a rate for every level"
        assert all(len(each) == len(self.conditional_acceptance) for each in self.other_profiles)
        assert self.drafts_by != "adaptive" or self.tiers[-1] <= self.k


@dataclass(eq=False)
class Request:
    """A request as the engine knows it, and what it reports."""

    number: int
    spec: RequestSpec
    output_tokens: int
    status: str = "completed"
    replica: int = 0
    computed: int = 0
    emitted: int = 0
    drafts: int = 0
    matched: bool | None = None  # whether its last attempt to draft found a match
    tier: int = 0
    smoothed: float = 0.0  # drafts that it usually accepts
    blocks: list[Block] = field(default_factory=list)
    registered: int = 0
    computed_when_preempted: int = 0
    marks: tuple[float, float] = (0.0, 0.0)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    first_output_s: float | None = None
    decode_target_s: float = 0.0
    decode_draft_s: float = 0.0
    hit_tokens: int = 0
    rehit_tokens: int = 0  # hit at readmissions
    recomputed_tokens: int = 0
    preemptions: int = 0
    chunk_steps: int = 0
    emitting_steps: int = 0
    emissions_s: list[float] = field(default_factory=list)
    spec_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    trimmed_tokens: int = 0
    truncated_drafts: int = 0  # drafts that were there, but found no budget or passed M

    @property
    def tokens(self) -> int:
        return self.spec.input_tokens + self.emitted

    @property
    def urgency(self) -> tuple[int, float, int]:
        """What priority scheduling goes by: the smallest runs first, the greatest is preempted first."""
        return self.spec.priority, self.spec.arrival_s, self.number

    @property
    def itl_s(self) -> list[float]:
        """The gaps between consecutive emissions."""
        return [after - before for before, after in pairwise(self.emissions_s)]

    @property
    def itl_max_s(self) -> float | None:
        return max(self.itl_s, default=None)

    @property
    def itl_p99_s(self) -> float | None:
        return float(np.percentile(self.itl_s, 99)) if self.itl_s else None

    def keys(self, config: ReferenceConfig) -> list[Key]:
        """Keys of all blocks that prompt and output can fill."""
        last = self.spec.input_tokens + self.output_tokens
        return block_keys(self.number, self.spec, config.block_tokens, config.trace_block_tokens, last)

    def check_outcome(self) -> None:
        """Every kept request emits exactly its output, once; a refused one does nothing."""
        assert self.emitted == self.output_tokens
        assert self.emitted == self.emitting_steps + self.accepted_tokens - self.trimmed_tokens
        assert self.accepted_tokens <= self.draft_tokens
        assert len(self.emissions_s) == self.emitting_steps
        assert all(gap > 0 for gap in self.itl_s), "two emissions at once"
        assert self.preemptions or self.rehit_tokens == self.recomputed_tokens == 0
        if self.status == "refused":
            assert self.scheduled_s is self.first_token_s is self.finish_s is None
            return
        assert self.hit_tokens < self.spec.input_tokens, "nothing left to compute"
        assert (self.first_token_s, self.finish_s) == (self.emissions_s[0], self.emissions_s[-1])
        assert self.spec.arrival_s <= self.scheduled_s < self.first_token_s <= self.finish_s
        decode_s = self.finish_s - self.first_token_s
        assert self.decode_target_s + self.decode_draft_s <= decode_s + 1e-9 * (1 + self.finish_s)
