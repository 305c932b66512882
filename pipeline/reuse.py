"""The clock-free reuse profile: how much of a trace's prompt work is reusable, at every cache size, in one pass.

Definitions (docs/metrics.md). A request's prompt is the chain of its block ids. With an unbounded cache it hits the longest
prefix seen before. With an LRU cache of C blocks, shared by the whole fleet and taking no time, it hits the longest prefix
that is resident when it arrives; then all its blocks are touched, last one first, so that a prefix outlives its extensions.

One pass gives every C (Mattson et al., 1970, applied to prefixes): read every id's position in the recency stack when the
request *arrives*, before it touches anything; an LRU cache of C blocks holds exactly the top C of the stack. Because ids are
touched last one first, positions grow along a chain, so counting each id for itself counts the longest resident prefix.

The position of an id is the number of ids touched since. A bitmap has one bit per touch, set while that touch is its id's
latest; counting set bits after a touch is a sum over 64-bit words, kept in a Fenwick tree over words. Blocks that were touched
side by side last time (nearly all blocks of a hit) need one count for the whole run: the next block of the chain was touched
just before its parent, so it lies one deeper.

Tokens. An engine reuses full blocks only and always computes the prompt's last token: of a prompt of L tokens, at most
`(L - 1) // B` blocks of B tokens count as reusable tokens. Block counts include the partial last block where the log names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from schemas.errors import InputError

NEVER = -1
"""Stack position of a block's first occurrence."""


@dataclass(frozen=True)
class ReuseProfile:
    """Per access (block of a request's prompt) and per request; n requests, m accesses, positions in blocks."""

    block_tokens: int
    positions: NDArray[np.int64]  # [m] blocks touched more recently; NEVER = first occurrence
    offsets: NDArray[np.int64]  # [n + 1] accesses of each request
    input_tokens: NDArray[np.int32]  # [n]
    countable: NDArray[np.int32]  # [n] blocks that may count as reused tokens: (L - 1) // B
    distinct_blocks: int

    @property
    def accesses(self) -> int:
        """Blocks of all prompts."""
        return int(self.positions.shape[0])

    def hit_blocks(self) -> NDArray[np.int64]:
        """[n] prefix blocks that each request hits in an unbounded cache."""
        seen = self.positions != NEVER
        sums = np.concatenate([[0], np.cumsum(seen)])
        hits: NDArray[np.int64] = sums[self.offsets[1:]] - sums[self.offsets[:-1]]
        return hits

    def hit_tokens(self) -> NDArray[np.int64]:
        """[n] prompt tokens that an engine of full blocks reuses, unbounded cache, last token computed."""
        return self.tokens_of(self.hit_blocks())

    def tokens_of(self, hit_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] prompt tokens that an engine of full blocks reuses where each request hits so many blocks."""
        return np.minimum(hit_blocks, self.countable) * self.block_tokens

    def curve(self) -> ReuseCurve:
        """Hits at every capacity."""
        seen = self.positions != NEVER
        place = np.arange(self.accesses) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        counts = seen & (place < np.repeat(self.countable, np.diff(self.offsets)))
        blocks = np.bincount(self.positions[seen], minlength=1)
        tokens = np.bincount(self.positions[counts], minlength=blocks.shape[0])
        steps = np.flatnonzero(blocks)
        return ReuseCurve(
            capacity_blocks=np.concatenate([[0], steps + 1]),
            hit_blocks=np.concatenate([[0], np.cumsum(blocks)[steps]]),
            hit_tokens=np.concatenate([[0], np.cumsum(tokens)[steps]]) * self.block_tokens,
            all_blocks=self.accesses,
            all_tokens=int(self.input_tokens.sum(dtype=np.int64)),
        )


@dataclass(frozen=True)
class ReuseCurve:
    """Hits as a step function of capacity: `hit_*[i]` hold from `capacity_blocks[i]` up to the next entry."""

    capacity_blocks: NDArray[np.int64]
    hit_blocks: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    all_blocks: int
    all_tokens: int

    def at(self, capacity_blocks: int) -> tuple[int, int]:
        """(blocks, tokens) hit by an LRU cache of that many blocks."""
        index = int(np.searchsorted(self.capacity_blocks, capacity_blocks, side="right")) - 1
        return int(self.hit_blocks[index]), int(self.hit_tokens[index])


def reuse_profile(
    block_offsets: NDArray[np.int64],
    block_ids: NDArray[np.uint32],
    input_tokens: NDArray[np.int32],
    block_tokens: int,
) -> ReuseProfile:
    """Profile a trace whose prompts are known. `block_ids` are dense: they serve as indices.

    Raises InputError where an id is no small integer.
    """
    distinct = int(block_ids.max(initial=0)) + 1 if block_ids.size else 0
    if distinct > max(4 * block_ids.size, 1024):
        raise InputError("block ids are not dense", mend="ingest the log again")
    positions = np.empty(block_ids.shape[0], np.int64)
    words = block_ids.shape[0] // 64 + 1
    _stack_positions(
        block_offsets,
        block_ids,
        np.full(max(distinct, 1), NEVER, np.int64),
        np.zeros(words, np.uint64),
        np.zeros(words + 1, np.int32),
        positions,
    )
    return ReuseProfile(
        block_tokens=block_tokens,
        positions=positions,
        offsets=block_offsets,
        input_tokens=input_tokens,
        countable=((input_tokens - 1) // block_tokens).astype(np.int32),
        distinct_blocks=int(np.count_nonzero(positions == NEVER)),
    )


@njit
def _popcount(word: np.uint64) -> np.int64:
    """Set bits of a word (Hacker's Delight, 5-1)."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit
def _up_to(bits: NDArray[np.uint64], tree: NDArray[np.int32], touch: int) -> np.int64:
    """Live touches at `touch` and before."""
    word = touch >> 6
    mask = ~np.uint64(0) >> np.uint64(63 - (touch & 63))
    count = _popcount(bits[word] & mask)
    while word > 0:
        count += tree[word]
        word -= word & -word
    return count


@njit
def _add(tree: NDArray[np.int32], word: int, amount: int | np.int64) -> None:
    """Change the live touches of a word. Mutates. `tree[i]` sums words before i, Fenwick's way."""
    place = word + 1
    while place < tree.shape[0]:
        tree[place] += amount
        place += place & -place


@njit
def _stack_positions(
    offsets: NDArray[np.int64],
    ids: NDArray[np.uint32],
    last_touch: NDArray[np.int64],
    bits: NDArray[np.uint64],
    tree: NDArray[np.int32],
    positions: NDArray[np.int64],
) -> None:
    """Fill `positions`: for each access, how many ids were touched more recently, when its request arrived. Mutates all."""
    one = np.uint64(1)
    touches = 0
    live = 0
    for request in range(offsets.shape[0] - 1):
        begin, end = offsets[request], offsets[request + 1]
        before = -2
        for access in range(begin, end):
            touch = last_touch[ids[access]]
            if touch == NEVER:
                positions[access] = NEVER
            elif touch == before - 1:
                positions[access] = positions[access - 1] + 1
            else:
                positions[access] = live - _up_to(bits, tree, touch)
            before = touch
        # Take the old touches out, a word at a time where they stand side by side.
        word = -1
        gone = np.uint64(0)
        for access in range(begin, end):
            touch = last_touch[ids[access]]
            if touch == NEVER:
                live += 1
                continue
            if touch >> 6 != word:
                if word >= 0:
                    _add(tree, word, -_popcount(gone))
                    bits[word] &= ~gone
                word = touch >> 6
                gone = np.uint64(0)
            gone |= one << np.uint64(touch & 63)
        if word >= 0:
            _add(tree, word, -_popcount(gone))
            bits[word] &= ~gone
        # Touch all, last one first.
        for access in range(end - 1, begin - 1, -1):
            last_touch[ids[access]] = touches
            bits[touches >> 6] |= one << np.uint64(touches & 63)
            touches += 1
        first = touches - (end - begin)
        while first < touches:
            word = first >> 6
            after = min(touches, (word + 1) << 6)
            _add(tree, word, after - first)
            first = after
