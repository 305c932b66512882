"""Dense, prefix-chained block ids from whatever hashes a log carries.

A dense id is the first-seen number of (identity, parent's dense id, the log's own hash). So equal ids always mean equal whole
prefixes under one identity contract, even where a log names blocks by content alone and the same hash stands behind different
prefixes, or where two identities share a hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit
from pipeline.replay.speculation import mix

_EMPTY = np.uint32(0xFFFFFFFF)
ROOT = np.int64(-1)
"""Parent of a prompt's first block."""


class BlockIds:
    """The table of known blocks, carried from batch to batch. Memory grows with distinct blocks only (36 bytes each)."""

    def __init__(self) -> None:
        """Empty."""
        self._slots = np.full(1 << 16, _EMPTY, np.uint32)  # open addressing: slot -> dense id
        self._keys = np.empty((1 << 15, 3), np.int64)  # dense id -> (identity, parent, raw)
        self.count = 0

    def dense(
        self, offsets: NDArray[np.int64], raw: NDArray[np.int64], identity: NDArray[np.int32]
    ) -> NDArray[np.uint32]:
        """Dense ids of a batch: `raw[offsets[i]:offsets[i + 1]]` are the blocks of a prompt under `identity[i]`."""
        self._grow(self.count + raw.shape[0])
        result = np.empty(raw.shape[0], np.uint32)
        self.count = _number(offsets, raw, identity, self._slots, self._keys, self.count, result)
        return result

    def _grow(self, wanted: int) -> None:
        """Room for `wanted` ids at a load of at most a half."""
        if wanted > self._keys.shape[0]:
            keys = np.empty((max(wanted, 2 * self._keys.shape[0]), 3), np.int64)
            keys[: self.count] = self._keys[: self.count]
            self._keys = keys
        size = self._slots.shape[0]
        while size < 2 * wanted:
            size *= 2
        if size > self._slots.shape[0]:
            self._slots = np.full(size, _EMPTY, np.uint32)
            _refill(self._slots, self._keys, self.count)


@njit
def _slot_of(
    slots: NDArray[np.uint32], keys: NDArray[np.int64], identity: np.int64, parent: np.int64, raw: np.int64
) -> np.int64:
    """Where a key is, or the empty slot where it belongs."""
    mask = np.uint64(slots.shape[0] - 1)
    place = mix(mix(mix(np.uint64(identity)) ^ np.uint64(parent)) ^ np.uint64(raw)) & mask
    while True:
        found = slots[place]
        if found == _EMPTY:
            return np.int64(place)
        if keys[found, 0] == identity and keys[found, 1] == parent and keys[found, 2] == raw:
            return np.int64(place)
        place = (place + np.uint64(1)) & mask


@njit
def _number(
    offsets: NDArray[np.int64],
    raw: NDArray[np.int64],
    identity: NDArray[np.int32],
    slots: NDArray[np.uint32],
    keys: NDArray[np.int64],
    count: int,
    result: NDArray[np.uint32],
) -> int:
    """Fill `result`; returns the new number of known ids. Mutates the table."""
    for prompt in range(offsets.shape[0] - 1):
        parent = np.int64(-1)
        scope = np.int64(identity[prompt])
        for place in range(offsets[prompt], offsets[prompt + 1]):
            slot = _slot_of(slots, keys, scope, parent, raw[place])
            found = slots[slot]
            if found == _EMPTY:
                found = np.uint32(count)
                slots[slot] = found
                keys[count, 0] = scope
                keys[count, 1] = parent
                keys[count, 2] = raw[place]
                count += 1
            result[place] = found
            parent = np.int64(found)
    return count


@njit
def _refill(slots: NDArray[np.uint32], keys: NDArray[np.int64], count: int) -> None:
    """Enter all known keys into an empty table. Mutates."""
    for known in range(count):
        slots[_slot_of(slots, keys, keys[known, 0], keys[known, 1], keys[known, 2])] = known
