"""Which blocks a reply fills, read off the next turn's prompt. See docs/replay.md, 'Replies that the next turn hits'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.jit import njit
from pipeline.trace import Trace

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

SUCCESSORS_LOOKED_AT = 32
"""Later requests of a session among which the next turn is looked for, so that one huge session costs no more than many."""


@dataclass(frozen=True)
class NamedBlocks:
    """The trace's ids, extended over replies. n requests."""

    block_offsets: Longs  # [n + 1] into block_ids
    block_ids: NDArray[np.uint32]
    named_tokens: Ints  # [n] first tokens of each sequence that its ids name
    inferred_from: Ints  # [n] tokens of each prompt from which on a hit may rest on inference ...
    inferred_to: Ints  # [n] ... up to here; equal = none does
    turns: int  # requests whose reply got ids

    def inferred_tokens(self, hit_tokens: Ints) -> Ints:
        """Of each request's hit tokens, those that rest on inference (at most: others may have computed the block, too)."""
        return np.maximum(0, np.minimum(hit_tokens, self.inferred_to) - self.inferred_from).astype(np.int32)


def name_replies(trace: Trace, block_tokens: int) -> NamedBlocks | None:
    """Infer the ids of replies from later turns; `block_tokens` is the engine's. None where no session has a next turn."""
    trace_block = trace.meta.block_tokens
    sessions = trace.table["session_id"]
    if trace_block is None or sessions.null_count == len(sessions):
        return None
    n = trace.input_tokens.shape[0]
    codes = pc.fill_null(sessions.combine_chunks().cast(pa.string()).dictionary_encode().indices, -1).to_numpy()
    identity = np.array(trace.table["identity"].to_numpy())
    order = np.lexsort((np.arange(n), identity, codes)).astype(np.int64)
    successor = np.full(n, -1, np.int64)
    _successors(
        order,
        codes.astype(np.int64),
        identity.astype(np.int64),
        trace.input_tokens,
        trace.output_tokens,
        trace.block_offsets,
        trace.block_ids,
        trace.has_identity,
        trace_block,
        successor,
    )
    lengths = np.diff(trace.block_offsets)
    whole = trace.input_tokens // trace_block
    names_partial = lengths > whole
    if block_tokens < trace_block:  # engine blocks lie inside the partial one: its name must not be lost to others
        uses = np.bincount(trace.block_ids, minlength=1)
        partial = trace.block_ids[np.minimum(trace.block_offsets[:-1] + whole, max(0, trace.block_ids.shape[0] - 1))]
        successor[names_partial & (uses[partial] > 1)] = -1
    turns = np.flatnonzero(successor >= 0)
    if turns.size == 0:
        return None
    covered = trace.input_tokens.astype(np.int64) + trace.output_tokens
    named = np.where(names_partial, trace.input_tokens, whole * trace_block).astype(np.int64)
    named[turns] = covered[turns]
    # Of the successor's ids, those that begin before the reply's end; the last may be missing if the successor has no partial id.
    wanted = lengths.copy()
    wanted[turns] = np.minimum(-(-covered[turns] // trace_block), lengths[successor[turns]])
    offsets = np.concatenate([[0], np.cumsum(wanted)]).astype(np.int64)
    source = np.where(successor >= 0, successor, np.arange(n))
    start = np.repeat(trace.block_offsets[source] - offsets[:-1], wanted)
    ids = trace.block_ids[np.arange(offsets[-1]) + start]
    first, last = np.full(n, np.iinfo(np.int32).max, np.int64), np.zeros(n, np.int64)
    # Engine blocks before `first` are named by the predecessor's own log; those after `last` it did not fill.
    np.minimum.at(first, successor[turns], whole[turns] * trace_block // block_tokens * block_tokens)
    np.maximum.at(last, successor[turns], covered[turns] // block_tokens * block_tokens)
    return NamedBlocks(
        offsets,
        ids.astype(np.uint32),
        named.astype(np.int32),
        np.minimum(first, last).astype(np.int32),
        last.astype(np.int32),
        int(turns.size),
    )


@njit
def _successors(
    order: Longs,
    session: Longs,
    identity: Longs,
    input_tokens: Ints,
    output_tokens: Ints,
    offsets: Longs,
    ids: NDArray[np.uint32],
    has_identity: NDArray[np.bool_],
    trace_block: int,
    successor: Longs,
) -> None:
    """Fill in each request's next turn, -1 = none. `order`: by session, identity, arrival. Mutates `successor`."""
    n = order.shape[0]
    for place in range(n):
        request = order[place]
        if session[request] < 0 or not has_identity[request]:
            continue
        whole = input_tokens[request] // trace_block
        covered = np.int64(input_tokens[request]) + output_tokens[request]
        for after in range(place + 1, min(n, place + 1 + SUCCESSORS_LOOKED_AT)):
            later = order[after]
            if session[later] != session[request] or identity[later] != identity[request]:
                break
            if not has_identity[later] or input_tokens[later] < covered:
                continue
            if whole > 0 and ids[offsets[request] + whole - 1] != ids[offsets[later] + whole - 1]:
                continue
            successor[request] = later
            break
