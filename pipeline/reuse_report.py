"""What `preplay reuse` prints: the ceiling, and LRU and other policies at chosen capacities, as plain records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import folders, reuse_eviction
from pipeline.reuse import ReuseProfile, reuse_profile
from pipeline.reuse_policies import optimal_hits, ttl_hits
from pipeline.reuse_tables import curve_table, distance_table, requests_table
from pipeline.trace import Trace
from schemas import hardware
from schemas.errors import InputError
from schemas.hardware import GIB

_PROFILE_FILES = frozenset({"curve.parquet", "requests.parquet", "distance.parquet"})


def summary_record(trace: Trace) -> tuple[dict[str, Any], ReuseProfile | None]:
    """The profile's headline and the profile itself; without prefix identity every reuse figure says so."""
    record: dict[str, Any] = {
        "requests": int(trace.input_tokens.shape[0]),
        "input_tokens": int(trace.input_tokens.sum(dtype=np.int64)),
        "prefix_identity": trace.meta.prefix_identity,
    }
    if trace.meta.prefix_identity == "unknown" or trace.meta.block_tokens is None:
        for name in ("ceiling_token_ratio", "ceiling_block_ratio", "reusable_tokens", "reuse_distance_p50_blocks"):
            record[name] = None
        return record, None
    profile = reuse_profile(trace.block_offsets, trace.block_ids, trace.input_tokens, trace.meta.block_tokens)
    hit_tokens, hit_blocks = profile.hit_tokens(), profile.hit_blocks()
    quantiles = np.quantile(hit_tokens, [0.25, 0.5, 0.75, 0.95], method="inverted_cdf").tolist()
    reused = np.sort(profile.positions[profile.positions >= 0])
    curve = profile.curve()
    record |= {
        "block_tokens": profile.block_tokens,
        "prompt_blocks": profile.accesses,
        "distinct_blocks": profile.distinct_blocks,
        "reusable_tokens": int(hit_tokens.sum()),
        "ceiling_token_ratio": float(hit_tokens.sum() / record["input_tokens"]),
        "reusable_blocks": int(hit_blocks.sum()),
        "ceiling_block_ratio": float(hit_blocks.sum() / profile.accesses) if profile.accesses else None,
        "requests_with_a_hit": float(np.mean(hit_blocks > 0)),
        **{f"hit_tokens_p{p}": q for p, q in zip((25, 50, 75, 95), quantiles, strict=True)},
        "reuse_distance_p50_blocks": int(reused[reused.size // 2]) if reused.size else None,
        "smallest_capacity_at_ceiling_blocks": int(curve.capacity_blocks[-1]),
    }
    return record, profile


def capacity_records(
    profile: ReuseProfile,
    trace: Trace,
    capacities: Sequence[int] | None,
    model: str | None,
    *,
    bound: bool,
    policies: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """LRU hits at each capacity, trace blocks; by default a ladder from 0.1 % of the distinct blocks to the ceiling.

    With `bound` also what the offline optimum would hit, the most that any policy could; with `policies` what these would.

    Raises InputError for a negative capacity or an unknown policy, CatalogError for an unknown model.
    """
    others: dict[str, reuse_eviction.Policy] = {"optimal": optimal_hits} if bound else {}
    others |= {name: reuse_eviction.policy(name) for name in policies}
    curve = profile.curve()
    if not capacities:
        shares = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
        ladder = sorted({max(1, round(profile.distinct_blocks * share)) for share in shares})
        capacities = [*ladder, int(curve.capacity_blocks[-1])]
    per_token = None if model is None else hardware.model(model).kv_bytes_per_token()
    records = []
    for capacity in capacities:
        if capacity < 0:
            raise InputError(f"a cache of {capacity} blocks can't be", mend="give a capacity of 0 or more")
        blocks, tokens = curve.at(capacity)
        record: dict[str, Any] = {"capacity_blocks": capacity, "capacity_tokens": capacity * profile.block_tokens}
        if per_token is not None:
            record["capacity_gib"] = capacity * profile.block_tokens * per_token / GIB
        record |= {
            "hit_blocks": blocks,
            "block_ratio": blocks / curve.all_blocks if curve.all_blocks else None,
            "hit_tokens": tokens,
            "token_ratio": tokens / curve.all_tokens if curve.all_tokens else None,
        }
        for name, hits_of in others.items():
            hits = hits_of(trace.block_offsets, trace.block_ids, capacity)
            tokens = int(profile.tokens_of(hits).sum())
            record[f"{name}_hit_blocks"] = int(hits.sum())
            record[f"{name}_token_ratio"] = tokens / curve.all_tokens if curve.all_tokens else None
        records.append(record)
    return records


MOST_TTL_S = 1e12
"""Longer than any log; microseconds of it fit an int64."""


def ttl_records(profile: ReuseProfile, trace: Trace, ttls_s: Sequence[float]) -> list[dict[str, Any]]:
    """Hits of an unbounded cache whose entries live so long, counted from their last use and from when they were written.

    Raises InputError for a negative time.
    """
    all_tokens = int(profile.input_tokens.sum(dtype=np.int64))
    records = []
    for ttl_s in ttls_s:
        if not 0 <= ttl_s <= MOST_TTL_S:
            raise InputError(f"a time to live of {ttl_s} s can't be", mend=f"give 0 to {MOST_TTL_S:.0e} seconds")
        record: dict[str, Any] = {"ttl_s": ttl_s}
        for name, refresh in (("refreshed", True), ("from_write", False)):
            hits = ttl_hits(trace.block_offsets, trace.block_ids, trace.arrival_us, round(ttl_s * 1e6), refresh=refresh)
            record[f"{name}_hit_blocks"] = int(hits.sum())
            record[f"{name}_token_ratio"] = int(profile.tokens_of(hits).sum()) / all_tokens if all_tokens else None
        records.append(record)
    return records


def save_profile(profile: ReuseProfile | None, out: Path, *, force: bool) -> None:
    """Write curve, requests and distances as Parquet into a new folder. Raises RunError where it may not."""
    folders.check_absent(out, force=force, own=_PROFILE_FILES)
    partial = folders.partial_of(out)
    with folders.claimed(partial, keep=False):
        folders.write_parquet(curve_table(profile), partial / "curve.parquet")
        folders.write_parquet(requests_table(profile), partial / "requests.parquet")
        folders.write_parquet(distance_table(profile), partial / "distance.parquet")
        folders.publish(partial, out)
