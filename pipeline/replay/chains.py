"""Which prefix each block of a request stands for: its id, and its place in it.

A request's pool blocks follow the trace's block ids; where the trace says nothing they belong to the request alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import njit

Ints = NDArray[np.int32]


class Chains(NamedTuple):
    """Which id each block of each request belongs to. T = trace block, B = pool block, q = T / B."""

    block_ids: NDArray[np.uint32]  # all requests' named trace blocks, one after the other
    offsets: NDArray[np.int64]  # [n + 1] into block_ids
    full_blocks: (
        Ints  # [n] pool blocks inside the prompt's full trace blocks: q * (input // T), 0 if identity is unknown
    )
    named_blocks: Ints  # [n] the same plus those inside a named partial trace block
    blocks_per_id: int  # q
    private_id: int  # request r's private tail has the id private_id + r


@njit
def locate(chains: Chains, request: int, block: int) -> tuple[int, int, int]:
    """The id of a request's block, the block's place in it, and how many of the request's blocks that id has."""
    full = chains.full_blocks[request]
    if block < full:
        q = chains.blocks_per_id
        return int(chains.block_ids[chains.offsets[request] + block // q]), block % q, q
    named = chains.named_blocks[request]
    if block < named:
        partial = chains.offsets[request] + full // chains.blocks_per_id
        return int(chains.block_ids[partial]), block - full, named - full
    return chains.private_id + request, block - named, 2**31 - 1
