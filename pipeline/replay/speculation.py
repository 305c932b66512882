"""What is drafted and which drafts are accepted.

Luck is a counter-based hash, so that it belongs to a request's position, not to the schedule: two scenarios that verify the same
draft position of the same request at output position p see the same random number. Source of the mixing function: SplitMix64
(Steele, Lea, Flood, OOPSLA 2014).

How many tokens are drafted at the end of a step, for the next one, is the policy's: by a table over the batch's rows, by the most
tokens per second that the cost model promises, or by tiers that follow each request's own acceptance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.lowered import LoweredCost, step_components
from pipeline.jit import njit

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
MATCH_SALT, LENGTH_SALT = np.uint64(0x6D61746368), np.uint64(0x6C656E677468)
"""Keep the luck of matches and of their lengths apart from that of acceptance."""

BY_BATCH, GOODPUT, ADAPTIVE = range(3)
POLICIES = {"fixed": BY_BATCH, "by_batch": BY_BATCH, "goodput": GOODPUT, "adaptive": ADAPTIVE}
SMOOTHING = 0.2
FIRST_CHANGE, CHANGE_EVERY = 10, 5
"""Of `adaptive`, as SGLang's adaptive speculation: the weight of the newest step, and after how many steps tiers may change."""


class Proposals(NamedTuple):
    """A proposer and its acceptance, as arrays. Levels: positions in sequence; drafts: tokens to verify (more, in a tree)."""

    policy: int
    k_of_batch: NDArray[np.int32]  # [max_sequences + 1] drafts by rows of the step, with BY_BATCH
    tiers: NDArray[np.int32]  # ascending, with ADAPTIVE
    depth_of: NDArray[np.int32]  # [most + 1] whole levels among so many drafts
    expected: NDArray[np.float64]  # [most + 1] tokens per step and row with so many drafts
    conditional: NDArray[np.float64]  # [profiles, levels] acceptance of each level, given that of all before it
    profile: NDArray[np.int32]  # [n] row of `conditional` of each request
    matches: bool  # a request drafts in steps with a match only
    hit_after_hit: NDArray[np.float64]  # [profiles]
    hit_after_miss: NDArray[np.float64]
    match_tokens: float  # mean length of a match, which bounds its drafts; 0 = every match yields all
    seed: np.uint64


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What the engine is told of a proposer. `conditional`: [profiles, levels], or [levels] for one profile."""

    conditional: NDArray[np.float64]
    profile: NDArray[np.int32] | None = None  # [n]; null = all requests are of the first
    widths: tuple[int, ...] = ()  # tokens per level; () = a chain
    lookahead: int | None = None  # KV slots beyond a row's tokens; null = as many as drafts
    slots: int = 0  # of the token budget that drafting takes per row
    policy: str = "fixed"  # POLICIES
    k_by_batch: tuple[tuple[int, int, int], ...] = ()  # (from rows, to rows, drafts), both ends included; others none
    tiers: tuple[int, ...] = (1, 3, 7)
    first_tier: int = 3
    hit_after_hit: float | None = None  # null = drafts in every step
    hit_after_miss: float = 0.0
    match_tokens: float = 0.0

    @property
    def levels(self) -> int:
        """Positions in sequence."""
        return int(np.atleast_2d(self.conditional).shape[1])

    @property
    def most(self) -> int:
        """Drafts of one row in one step, at most."""
        return sum(self.widths) if self.widths else self.levels


def chain(*conditional: float) -> Drafting:
    """A chain drafter with the same acceptance for every request."""
    return Drafting(conditional=np.array(conditional, np.float64))


def expected_tokens(conditional: NDArray[np.float64]) -> NDArray[np.float64]:
    """[levels + 1] tokens per step with 0, 1, ... levels drafted, the target's own included; profiles [profiles, levels] are
    averaged with equal weight.
    """
    survival = np.cumprod(np.atleast_2d(conditional), axis=1).mean(axis=0)
    return np.concatenate([[1.0], 1.0 + np.cumsum(survival)])


def proposals_of(drafting: Drafting | None, requests: int, max_sequences: int, seed: int) -> Proposals:
    """The arrays. Without drafting everything is empty and never read."""
    if drafting is None:
        nothing, zeros = np.zeros((1, 1)), np.zeros(1)
        none = np.zeros(1, np.int32)
        return Proposals(
            BY_BATCH, np.zeros(max_sequences + 1, np.int32), none, none, np.ones(1), nothing, none, False, zeros, zeros, 0.0,
            np.uint64(seed),
        )  # fmt: skip
    conditional = np.ascontiguousarray(np.atleast_2d(drafting.conditional), np.float64)
    profiles, levels = conditional.shape
    ends = np.cumsum(drafting.widths) if drafting.widths else np.arange(1, levels + 1)
    depth_of = np.searchsorted(ends, np.arange(drafting.most + 1), side="right").astype(np.int32)
    table = np.full(max_sequences + 1, 0 if drafting.k_by_batch else drafting.most, np.int32)
    for low, high, k in drafting.k_by_batch:
        table[low : high + 1] = k
    hits = drafting.hit_after_hit
    return Proposals(
        policy=POLICIES[drafting.policy],
        k_of_batch=table,
        tiers=np.array(drafting.tiers, np.int32),
        depth_of=depth_of,
        expected=expected_tokens(conditional)[depth_of],
        conditional=conditional,
        profile=np.zeros(requests, np.int32) if drafting.profile is None else drafting.profile.astype(np.int32),
        matches=hits is not None,
        hit_after_hit=np.full(profiles, 0.0 if hits is None else hits),
        hit_after_miss=np.full(profiles, drafting.hit_after_miss),
        match_tokens=drafting.match_tokens,
        seed=np.uint64(seed),
    )


@njit
def mix(value: np.uint64) -> np.uint64:
    """SplitMix64's next output from the state `value`."""
    z = value + _GAMMA
    z = (z ^ (z >> _SHIFT_30)) * _MULTIPLIER_1
    z = (z ^ (z >> _SHIFT_27)) * _MULTIPLIER_2
    return z ^ (z >> _SHIFT_31)


@njit
def uniform(seed: np.uint64, request: int, position: int) -> float:
    """A number in [0, 1) that depends on these three and nothing else."""
    return uniform_at(mix(mix(seed) ^ np.uint64(request)), position)


@njit
def uniform_at(stream: np.uint64, position: int) -> float:
    """The same, from `mix(mix(seed) ^ request)`, which is worth computing once per step."""
    return float(mix(stream ^ np.uint64(position)) >> _SHIFT_11) * 2.0**-53


@njit
def accepted_levels(proposals: Proposals, request: int, position: int, levels: int) -> int:
    """How many of `levels` levels of drafts are accepted, the first of which stands at output `position` (0-based)."""
    stream = mix(mix(proposals.seed) ^ np.uint64(request))
    profile = proposals.profile[request]
    count = 0
    while count < levels and uniform_at(stream, position + count) < proposals.conditional[profile, count]:
        count += 1
    return count


@njit
def drafted(proposals: Proposals, request: int, position: int, most: int, matched: int) -> int:
    """How many of `most` drafts a request gets whose next token stands at output `position`; `matched`: whether the step before
    had a match (-1 = there was none before: a draw from the long run's share). 0 = no match.
    """
    if not proposals.matches:
        return most
    profile = proposals.profile[request]
    after_hit, after_miss = proposals.hit_after_hit[profile], proposals.hit_after_miss[profile]
    chance = after_hit if matched == 1 else after_miss
    if matched < 0:
        chance = after_miss / (1.0 - after_hit + after_miss) if after_hit < 1.0 or after_miss > 0.0 else 1.0
    if uniform(proposals.seed ^ MATCH_SALT, request, position) >= chance:
        return 0
    if proposals.match_tokens <= 1.0:
        return most
    left = uniform(proposals.seed ^ LENGTH_SALT, request, position)
    length = 1.0 + math.floor(math.log1p(-left) / math.log1p(-1.0 / proposals.match_tokens))
    return int(min(float(most), length))


@njit
def best_drafts(cost: LoweredCost, proposals: Proposals, rows: int, context: float, max_batched_tokens: int) -> int:
    """The number of drafts with the most tokens per second, if the next step holds these rows and no prefill.

    `context`: sum over rows of tokens computed so far. Ties go to fewer drafts.
    """
    best, best_rate = 0, 0.0
    for drafts in range(proposals.expected.shape[0]):
        tokens = rows * (1 + drafts)
        if tokens > max_batched_tokens:
            break
        depth = proposals.depth_of[drafts]
        if drafts > 0 and depth == proposals.depth_of[drafts - 1]:
            continue  # a level that is not whole
        keys = context + tokens
        parts = step_components(
            cost, tokens, rows, tokens, keys, keys / rows, 0, 0, 0.0, 0, 0.0, 0.0, 1, depth
        )  # fmt: skip
        seconds = parts[0] + parts[1] + parts[2] + parts[3] + parts[4] + parts[5] + parts[6]
        rate = proposals.expected[drafts] / seconds
        if rate > best_rate:
            best, best_rate = drafts, rate
    return best


@njit
def next_tier(proposals: Proposals, tier: int, smoothed: float, steps: int) -> int:
    """A request's tier after its verification number `steps`: the smallest with room for one more than it usually accepts."""
    if steps < FIRST_CHANGE or steps % CHANGE_EVERY:
        return tier
    wanted = math.floor(smoothed + 0.5) + 1
    for each in proposals.tiers:
        if each >= wanted:
            return int(each)
    return int(proposals.tiers[-1])
