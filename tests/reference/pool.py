"""The KV pool of docs/replay.md, one object per block. Slow and plain: an oracle, not an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.reference import Key


@dataclass
class Block:
    """One physical block."""

    number: int
    key: Key | None = None  # registered under this key, or blank
    refs: int = 0


class KvPool:
    """Free queue: blank blocks at the front, cached ones by time of release, taken from the front."""

    def __init__(self, capacity: int, unhashed_last: bool = False) -> None:
        self.unhashed_last = unhashed_last
        self.blocks = [Block(number) for number in range(capacity)]
        self.free: deque[Block] = deque(self.blocks)
        self.registered: dict[Key, list[Block]] = {}  # copies in order of registration
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
            if block.refs == 0:
                self.free.remove(block)
            block.refs += 1

    def allocate(self, count: int) -> list[Block]:
        """Take blocks from the front of the free queue, evicting what is cached in them."""
        taken = []
        for _ in range(count):
            block = self.free.popleft()
            if block.key is not None:
                copies = self.registered[block.key]
                copies.remove(block)
                if not copies:
                    del self.registered[block.key]
                block.key = None
                self.evicted += 1
            block.refs = 1
            taken.append(block)
        return taken

    def register(self, block: Block, key: Key) -> None:
        """Make a held block findable, behind the copies that are registered already."""
        assert block.refs > 0 and block.key is None
        block.key = key
        self.registered.setdefault(key, []).append(block)

    def release(self, blocks: list[Block]) -> None:
        """Let go of a request's blocks, last one first: cached ones to the queue's tail, blank ones to its head."""
        for block in reversed(blocks):
            block.refs -= 1
            assert block.refs >= 0, "released more often than held"
            if block.refs == 0:
                if block.key is None and not self.unhashed_last:
                    self.free.appendleft(block)
                else:
                    self.free.append(block)

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
        blanks_over = False
        for block in self.free:
            blanks_over = blanks_over or block.key is not None
            assert self.unhashed_last or not (blanks_over and block.key is None), "a blank block behind a cached one"
