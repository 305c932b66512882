"""What a replay writes: one outcome per request, one timeline row per replica and interval.

Units are in the names. Times are simulated time; `arrival_s` counts from the trace's first arrival, after the scenario's
workload transform. Definitions of TTFT, TPOT and E2E follow vLLM's and AIPerf's benchmarks (see `docs/metrics.md`).
"""

from __future__ import annotations

import pyarrow as pa

OUTCOME_STATUSES = ("completed", "refused")

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("request", pa.int32(), nullable=False),  # row of the trace: the key for pairing scenarios
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("model", pa.string()),
        pa.field("tenant", pa.string()),
        pa.field("session_id", pa.string()),
        pa.field("status", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("replica", pa.int32(), nullable=False),
        pa.field("arrival_s", pa.float64(), nullable=False),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),  # emitted; 0 when refused
        pa.field(
            "clipped", pa.bool_(), nullable=False
        ),  # the log's output was longer than the engine's longest sequence allows
        pa.field("warmup", pa.bool_(), nullable=False),  # arrives in the warm-up: replayed, not measured
        pa.field("hit_tokens", pa.int32()),  # at first admission; null = identity unknown, whatever the scenario
        pa.field("hit_tokens_inferred", pa.int32()),  # of these, at most so many rest on inferred replies
        pa.field("rehit_tokens", pa.int32()),  # hit at readmissions after a preemption: its own earlier work, no reuse
        pa.field("recomputed_tokens", pa.int32(), nullable=False),  # computed again after a preemption
        pa.field("preemptions", pa.int32(), nullable=False),
        # latency, reconciling exactly: ttft = queue + prefill + first_output; e2e = ttft + decode;
        # decode = decode_draft + decode_target + decode_rest. Null when refused.
        pa.field("queue_ms", pa.float64()),
        pa.field("prefill_ms", pa.float64()),
        pa.field("first_output_ms", pa.float64()),
        pa.field("ttft_ms", pa.float64()),
        pa.field("decode_ms", pa.float64()),
        pa.field("decode_draft_ms", pa.float64()),
        pa.field("decode_target_ms", pa.float64()),
        pa.field("decode_rest_ms", pa.float64()),
        pa.field("tpot_ms", pa.float64()),  # null for a single output token
        pa.field("itl_p99_ms", pa.float64()),  # of the gaps between its emissions; null with fewer than two emissions
        pa.field("itl_max_ms", pa.float64()),
        pa.field("e2e_ms", pa.float64()),
        pa.field("chunk_steps", pa.int32(), nullable=False),  # steps in which it was scheduled and emitted nothing
        pa.field("emitting_steps", pa.int32(), nullable=False),  # steps in which it emitted tokens
        pa.field("spec_steps", pa.int32(), nullable=False),  # of these, steps in which drafts were verified
        pa.field("draft_tokens", pa.int32(), nullable=False),
        pa.field("accepted_tokens", pa.int32(), nullable=False),  # accepted drafts, before trimming at the output's end
        pa.field("trimmed_tokens", pa.int32(), nullable=False),  # output_tokens = emitting_steps + accepted - trimmed
        pa.field("observed_ttft_ms", pa.float64()),
        pa.field("observed_tpot_ms", pa.float64()),
        pa.field("observed_e2e_ms", pa.float64()),
        pa.field("observed_cached_tokens", pa.int32()),
    ]
)

COMPONENTS = (
    "gemm",
    "attention_prefill",
    "attention_decode",
    "communication",
    "sampling",
    "draft",
    "overhead",
)
"""The parts of a step's time, in the order of every array that holds them. They add up to the step."""

TIMELINE_COUNTERS = (
    "arrivals",
    "finished",
    "steps",
    "prefill_tokens",  # computed by prefilling rows; recomputation after a preemption, generated tokens included, counts here
    "decode_tokens",  # query tokens of decoding rows, drafts included
    "emitted_tokens",
    "draft_tokens",  # verified
    "accepted_tokens",  # of these, before trimming at an output's end
    "hit_tokens",
    "rehit_tokens",  # hit at readmissions after a preemption
    "evicted_blocks",  # cached blocks taken for new content
    "evicted_decode_blocks",  # of these, taken by decoding rows
    "expired_blocks",  # cached blocks dropped at the end of their time to live
    "preemptions",
)
TIMELINE_INTEGRALS = (
    "waiting_mean",  # requests in the queue, time-weighted over the interval
    "running_mean",
    "kv_used_blocks_mean",  # blocks held by running requests
    "kv_cached_blocks_mean",  # blocks held by nobody whose content can still be hit
)

TIMELINE_SCHEMA = pa.schema(
    [
        pa.field("replica", pa.int32(), nullable=False),
        pa.field("interval", pa.int32(), nullable=False),
        pa.field("start_s", pa.float64(), nullable=False),
        pa.field("interval_s", pa.float64(), nullable=False),
        # hit_tokens and rehit_tokens are null where the trace's prefix identity is not known
        *[pa.field(name, pa.int64(), nullable=name in ("hit_tokens", "rehit_tokens")) for name in TIMELINE_COUNTERS],
        *[pa.field(name, pa.float64(), nullable=False) for name in TIMELINE_INTEGRALS],
        *[pa.field(f"{name}_s", pa.float64(), nullable=False) for name in COMPONENTS],
    ]
)
"""Counters and component times of a step are booked in the interval in which it starts; means are exact for the interval."""
