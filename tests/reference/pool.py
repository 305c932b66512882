"""The KV pool of docs/replay.md, one object per block. Slow and plain: an oracle, not an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.reference import Key


@dataclass(eq=False)
class Block:
    """One physical block."""

    number: int
    key: Key | None = None  # registered under this key, or blank
    refs: int = 0
    depth: int = 0  # which block of its sequence it is
    go: int = 0  # with which others it was registered: blocks of one go have the same number, later goes greater ones
    uses: int = 0  # registered, hit, merged with
    registered_s: float = 0.0
    released_s: float = 0.0


class KvPool:
    """Free queue: blank blocks at the front, cached ones by time of release; which one is taken is the policy's choice."""

    def __init__(
        self,
        capacity: int,
        unhashed_last: bool = False,
        *,
        policy: str = "lru",
        priority_blocks: int = 0,
        ttl_s: float | None = None,
        merge_duplicates: bool = False,
    ) -> None:
        self.unhashed_last = unhashed_last
        self.policy = policy
        self.priority_blocks = priority_blocks
        self.ttl_s = ttl_s
        self.merge_duplicates = merge_duplicates
        self.blocks = [Block(number) for number in range(capacity)]
        self.free: deque[Block] = deque(self.blocks)
        self.registered: dict[Key, list[Block]] = {}  # copies in order of registration
        self.goes = 0
        self.evicted = 0

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    @property
    def cached_blocks(self) -> int:
        return sum(block.key is not None for block in self.free)

    @property
    def blank_blocks(self) -> int:
        return sum(block.key is None for block in self.free)

    @property
    def used_blocks(self) -> int:
        return sum(block.refs > 0 for block in self.blocks)

    # Finding and holding

    def lookup(self, keys: list[Key]) -> list[Block]:
        """The longest run of registered keys from the first on; the oldest copy of each. Does not mutate."""
        hits = []
        for key in keys:
            copies = self.registered.get(key)
            if not copies:
                break
            hits.append(copies[0])
        return hits

    def can_allocate(self, count: int, hits: Sequence[Block] = ()) -> bool:
        """Whether `count` blocks are free besides those of `hits` that nobody holds. Does not mutate."""
        return count + sum(block.refs == 0 for block in hits) <= self.free_blocks

    def touch(self, hits: list[Block]) -> None:
        """Hold each hit block once more; a free one leaves the free queue, so that it can't be its hitter's victim."""
        for block in hits:
            assert block.key is not None, "a hit on a block that is not resident"
            if block.refs == 0:
                self.free.remove(block)
            block.refs += 1
            block.uses += 1

    def allocate(self, count: int) -> list[Block]:
        """Take blocks from the free queue, evicting what is cached in them."""
        taken = []
        for _ in range(count):
            block = min(self.free, key=self.rank)  # the first one of those with the least rank
            self.free.remove(block)
            if block.key is not None:
                self.forget(block)
                self.evicted += 1
            block.refs = 1
            taken.append(block)
        return taken

    def rank(self, block: Block) -> tuple[int, ...]:
        """Free blocks are taken in this order, equal ones in the queue's order. A blank one's is less than any other."""
        if self.policy == "lru" or block.key is None:
            return ()
        if self.policy == "fifo":
            return block.go, -block.depth
        if self.policy == "lfu":
            return (block.uses,)
        return (int(block.depth < self.priority_blocks),)

    # Registering and forgetting

    def register_from(self, first: int, blocks: list[Block], keys: list[Key], now: float) -> None:
        """Register, in one go, a request's blocks from the first one on that isn't; where merged, replace it in `blocks`."""
        self.goes += 1
        for depth in range(first, len(keys)):
            blocks[depth] = self.register(blocks[depth], keys[depth], depth, now)

    def register(self, block: Block, key: Key, depth: int = 0, now: float = 0.0) -> Block:
        """Make a held block findable, behind the copies that are registered already, or let it merge with the one that is.
        The block that is held now."""
        assert block.refs > 0 and block.key is None
        if self.merge_duplicates and key in self.registered:
            (same,) = self.registered[key]
            self.touch([same])
            assert block.refs == 1, "a block without a key is held by more than one"
            block.refs = 0
            self.free.appendleft(block)
            return same
        block.key, block.depth, block.go, block.uses, block.registered_s = key, depth, self.goes, 1, now
        self.registered.setdefault(key, []).append(block)
        return block

    def forget(self, block: Block) -> None:
        """Make a block blank."""
        copies = self.registered[block.key]
        copies.remove(block)
        if not copies:
            del self.registered[block.key]
        block.key = None

    def release(self, blocks: list[Block], now: float = 0.0) -> None:
        """Let go of a request's blocks, last one first: cached ones to the queue's tail, blank ones to its head."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0, "released more often than held"
            if block.refs == 0:
                block.released_s = now
                if block.key is None and not self.unhashed_last:
                    self.free.appendleft(block)
                else:
                    self.free.append(block)

    # Time to live

    def expiry(self, block: Block) -> float:
        """When a cached block's time to live ends."""
        return (block.registered_s if self.policy == "fifo" else block.released_s) + self.ttl_s

    def expired(self, before: float) -> list[Block]:
        """Cached blocks that nobody holds and whose time to live ends before then, in this order. Does not mutate."""
        if self.ttl_s is None:
            return []
        cached = [block for block in self.free if block.key is not None and self.expiry(block) < before]
        return sorted(cached, key=self.expiry)

    def drop(self, block: Block) -> None:
        """End of a cached block: it becomes blank."""
        self.forget(block)
        self.free.remove(block)
        self.free.appendleft(block)

    # Invariants

    def check_integrity(self) -> None:
        """Everything that holds between any two calls. Does not mutate."""
        free = set()
        for block in self.free:
            assert block.refs == 0, "a held block is in the free queue"
            assert block.number not in free, "a block is in the free queue twice"
            free.add(block.number)
        for block in self.blocks:
            assert block.refs >= 0, "negative references"
            assert (block.number in free) == (block.refs == 0), "a block that nobody holds is not in the free queue"
        listed = [block for copies in self.registered.values() for block in copies]
        assert len(listed) == sum(block.key is not None for block in self.blocks), "a registered block can't be found"
        assert all(block.key == key for key, copies in self.registered.items() for block in copies)
        assert len({block.number for block in listed}) == len(listed), "a block is registered twice"
        assert all(self.registered.values()), "a key without a block"
        assert self.used_blocks + self.cached_blocks + self.blank_blocks == len(self.blocks)
        assert all(block.uses > 0 and block.registered_s <= block.released_s for block in listed if not block.refs)
        if self.merge_duplicates:
            assert len(listed) == len(self.registered), "a key is registered twice"
        cached = [block for block in self.free if block.key is not None]
        assert all(a.released_s <= b.released_s for a, b in pairwise(cached)), "the queue is not in order of release"
        blanks_over = False
        for block in self.free:
            blanks_over = blanks_over or block.key is not None
            assert self.unhashed_last or not (blanks_over and block.key is None), "a blank block behind a cached one"
