"""The reuse profile as tables; empty, with the same columns, where the trace's prefix identity is unknown."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.reuse import NEVER, ReuseProfile

CURVE_SCHEMA = pa.schema(
    [
        pa.field("capacity_blocks", pa.int64(), nullable=False),  # holds up to the next row
        pa.field("capacity_tokens", pa.int64(), nullable=False),
        pa.field("hit_blocks", pa.int64(), nullable=False),
        pa.field("hit_tokens", pa.int64(), nullable=False),
        pa.field("all_blocks", pa.int64(), nullable=False),
        pa.field("all_tokens", pa.int64(), nullable=False),
    ]
)
"""LRU hits as a step function of capacity, one cache for the whole trace, zero time."""

REQUESTS_SCHEMA = pa.schema(
    [
        pa.field("request", pa.int32(), nullable=False),
        pa.field("prompt_blocks", pa.int32(), nullable=False),
        pa.field("hit_blocks", pa.int32(), nullable=False),
        pa.field("hit_tokens", pa.int32(), nullable=False),
    ]
)
"""What each request would hit in an unbounded cache."""

DISTANCE_SCHEMA = pa.schema(
    [
        pa.field("from_blocks", pa.int64(), nullable=False),  # reuse distance, inclusive
        pa.field("below_blocks", pa.int64(), nullable=False),  # exclusive
        pa.field("accesses", pa.int64(), nullable=False),
    ]
)
"""Reuse distance: blocks touched between two uses of a block, in powers of two. First uses have no row."""


def curve_table(profile: ReuseProfile | None) -> pa.Table:
    """CURVE_SCHEMA, one row per capacity at which the hits change."""
    if profile is None:
        return CURVE_SCHEMA.empty_table()
    curve = profile.curve()
    rows = curve.capacity_blocks.shape[0]
    return pa.table(
        {
            "capacity_blocks": curve.capacity_blocks,
            "capacity_tokens": curve.capacity_blocks * profile.block_tokens,
            "hit_blocks": curve.hit_blocks,
            "hit_tokens": curve.hit_tokens,
            "all_blocks": np.full(rows, curve.all_blocks),
            "all_tokens": np.full(rows, curve.all_tokens),
        },
        schema=CURVE_SCHEMA,
    )


def requests_table(profile: ReuseProfile | None) -> pa.Table:
    """REQUESTS_SCHEMA, one row per request of the trace."""
    if profile is None:
        return REQUESTS_SCHEMA.empty_table()
    requests = profile.input_tokens.shape[0]
    return pa.table(
        {
            "request": np.arange(requests, dtype=np.int32),
            "prompt_blocks": np.diff(profile.offsets).astype(np.int32),
            "hit_blocks": profile.hit_blocks().astype(np.int32),
            "hit_tokens": profile.hit_tokens().astype(np.int32),
        },
        schema=REQUESTS_SCHEMA,
    )


def distance_table(profile: ReuseProfile | None) -> pa.Table:
    """DISTANCE_SCHEMA, one row per power of two from 0 to the largest distance."""
    if profile is None:
        return DISTANCE_SCHEMA.empty_table()
    distances = profile.positions[profile.positions != NEVER]
    # Bin 0 holds distance 0, bin i the distances from 2**(i - 1) up to 2**i - 1.
    bins = np.where(distances == 0, 0, np.floor(np.log2(np.maximum(distances, 1))).astype(np.int64) + 1)
    counts = np.bincount(bins, minlength=1)
    below = 2 ** np.arange(counts.shape[0], dtype=np.int64)
    return pa.table(
        {"from_blocks": np.where(below == 1, 0, below // 2), "below_blocks": below, "accesses": counts},
        schema=DISTANCE_SCHEMA,
    )
