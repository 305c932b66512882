"""A replay on its fixed schedule: who ran in which step stays as it was, only the steps' durations move.

Then every latency is a sum of durations, so its gradient is the cost model's, summed over steps. Which steps a request's latency
counts: those from its arrival to the token. Where the step in progress at its arrival left work for later (requests in the queue,
or the token budget spent), what stands before it is a backlog, and how long that is depends on every step since the backlog began:
they count too. Otherwise the step in progress counts by the share that was still to come.

What it can't see: a slower GPU also makes fuller batches, other evictions, and backlogs where there were none. Slopes are exact for
changes too small to reorder anything; a replay of the changed study says what a large change does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.cost.elasticity import ALL_KINDS, RATE_KINDS, step_gradients
from pipeline.cost.model import StepCostModel
from pipeline.replay.engine import ReplayResult
from pipeline.replay.engine import replay as run_replay
from pipeline.scenario import ResolvedScenario, arrivals_of, engine_config
from pipeline.trace import Trace

METRICS = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p50", "e2e_p95")
"""What `elasticity_rows` takes apart."""

ELASTICITY_SCHEMA = pa.schema(
    [
        pa.field("scenario", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("metric", pa.string(), nullable=False),  # of METRICS
        pa.field("value_ms", pa.float64()),  # null = no request has one
        *[pa.field(f"elasticity_{kind}", pa.float64()) for kind in ALL_KINDS],  # % for 1 % more; negative for rates
        pa.field("elasticity_all", pa.float64()),  # % for 1 % more time in everything; over 1 = a backlog
    ]
)


@dataclass(frozen=True)
class FixedSchedule:
    """All replicas' steps, one after the other; requests are those that completed and are measured, m of them."""

    features: NDArray[np.float64]  # [steps, STEP_FEATURES]
    seconds: NDArray[np.float64]  # [steps] as they were
    requests: NDArray[np.int64]  # [m] rows of the trace
    arrival_s: NDArray[np.float64]  # [m]
    tokens: NDArray[np.int64]  # [m] emitted
    begin: NDArray[np.int64]  # [m] the first step that counts whole
    since_s: NDArray[np.float64]  # [m] time from the arrival to it that no step's duration moves: negative in a backlog
    partial: NDArray[np.int64]  # [m] the step in progress at the arrival, of which ...
    partial_share: NDArray[np.float64]  # [m] ... this share counts
    first: NDArray[np.int64]  # [m] the step that emitted the first token
    last: NDArray[np.int64]  # [m] the step that emitted the last one

    def latencies(self, latency: str, seconds: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """[m] seconds of `ttft`, `tpot` or `e2e`, with the steps' durations as they were, or as given. TPOT of one token is NaN."""
        durations = self.seconds if seconds is None else seconds
        sums = self.summed(latency, durations)
        return np.where(self.tokens > 1, sums, np.nan) if latency == "tpot" else sums + self.since_s

    def summed(self, latency: str, per_step: NDArray[np.float64]) -> NDArray[np.float64]:
        """[m, ...] of a quantity per step [steps, ...] (seconds, or their gradients), what goes into each request's `latency`."""
        sums = np.concatenate([np.zeros((1, *per_step.shape[1:])), np.cumsum(per_step, axis=0)])
        if latency == "tpot":
            share = (1.0 / np.maximum(1, self.tokens - 1)).reshape(-1, *[1] * (per_step.ndim - 1))
            return np.asarray((sums[self.last + 1] - sums[self.first + 1]) * share)
        end = self.first if latency == "ttft" else self.last
        partial = self.partial_share.reshape(-1, *[1] * (per_step.ndim - 1)) * per_step[self.partial]
        return np.asarray(sums[end + 1] - sums[self.begin] + partial)

    def weights(self, latency: str, rows: NDArray[np.int64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """[steps] how much a weighted sum of some requests' `latency` grows with each step's duration."""
        changes = np.zeros(self.seconds.shape[0] + 1)
        if latency == "tpot":
            weight = weight / np.maximum(1, self.tokens[rows] - 1)
            np.add.at(changes, self.first[rows] + 1, weight)
        else:
            np.add.at(changes, self.begin[rows], weight)
        end = self.first if latency == "ttft" else self.last
        np.add.at(changes, end[rows] + 1, -weight)
        counts = np.cumsum(changes[:-1])
        if latency != "tpot":
            np.add.at(counts, self.partial[rows], weight * self.partial_share[rows])
        return np.asarray(counts)


def fixed_schedule(result: ReplayResult, measured: NDArray[np.bool_]) -> FixedSchedule:
    """From a replay that kept its steps; `measured`: [n] which requests count."""
    schedules = result.schedules
    sizes = np.array([each.end_s.shape[0] for each in schedules], np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    starts = np.concatenate([each.start_s for each in schedules])
    ends = np.concatenate([each.end_s for each in schedules])
    left = np.concatenate([each.left for each in schedules])
    rows = np.flatnonzero(measured & ~result.refused)
    requests = result.requests
    arrival_s, replica = requests.arrival_s[rows], result.replica[rows]
    before = np.empty(rows.shape[0], np.int64)  # the last step that started before the arrival; offset - 1 = none did
    for index, each in enumerate(schedules):
        mine = replica == index
        before[mine] = offsets[index] + np.searchsorted(each.start_s, arrival_s[mine], side="left") - 1
    in_progress = (before >= offsets[replica]) & (ends[before] > arrival_s)
    # A backlog begins with the first of the steps without a gap that all left work for later.
    goes_on = np.zeros(starts.shape[0], bool)
    goes_on[1:] = left[:-1] & left[1:] & (starts[1:] == ends[:-1])
    goes_on[offsets[:-1][sizes > 0]] = False
    backlog_of = np.maximum.accumulate(np.where(goes_on, 0, np.arange(starts.shape[0])))
    behind = in_progress & left[before]
    begin = np.where(behind, backlog_of[before], before + 1)
    partial_share = np.where(in_progress & ~behind, (ends[before] - arrival_s) / (ends[before] - starts[before]), 0.0)
    first = offsets[replica] + requests.first_step[rows]
    return FixedSchedule(
        features=np.concatenate([each.features for each in schedules]),
        seconds=ends - starts,
        requests=rows,
        arrival_s=arrival_s,
        tokens=requests.emitted[rows].astype(np.int64),
        begin=begin,
        since_s=np.where(behind | ~in_progress, starts[begin] - arrival_s, 0.0),
        partial=np.maximum(0, before),
        partial_share=partial_share,
        first=first,
        last=first + requests.emitting_steps[rows] - 1 + requests.silent_steps[rows],
    )


def scheduled(resolved: ResolvedScenario, trace: Trace, seed: int) -> FixedSchedule:
    """Replay a scenario and keep its schedule."""
    arrivals, _ = arrivals_of(resolved, trace, seed)
    config = replace(engine_config(resolved, seed), keep_steps=True, itl=False)
    result = run_replay(arrivals, config, resolved.hardware.lowered)
    measured = trace.arrival_us >= resolved.scenario.workload.warmup_s * 1e6
    return fixed_schedule(result, measured)


def quantile_weights(values: NDArray[np.float64], q: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The (at most two) rows whose values make the quantile, linear between order statistics as everywhere, and their weights."""
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    place = q * (order.shape[0] - 1)
    below = int(place)
    above = min(below + 1, order.shape[0] - 1)
    return order[[below, above]], np.array([1.0 - (place - below), place - below])


def elasticity_rows(
    schedule: FixedSchedule, model: StepCostModel, metrics: Sequence[str] = METRICS
) -> list[dict[str, Any]]:
    """One record per metric: its value, and the change of it in per cent for 1 % more of each kind of constant.

    `elasticity_all`: for 1 % more time in everything; over 1 in a backlog. A metric without requests
    (TPOT where nobody got two tokens) has null in every column.
    """
    weights, values = [], []
    for metric in metrics:
        latency, percentile = metric.split("_p")
        of_requests = schedule.latencies(latency)
        if np.isnan(of_requests).all():
            weights.append(np.zeros(schedule.seconds.shape[0]))
            values.append(np.nan)
            continue
        rows, share = quantile_weights(of_requests, float(percentile) / 100)
        weights.append(schedule.weights(latency, rows, share))
        values.append(float(of_requests[rows] @ share))
    counts = np.array(weights)  # [metrics, steps]
    steps = np.flatnonzero((np.abs(counts) > 1e-12).any(axis=0))
    _, gradients = step_gradients(model, torch.from_numpy(schedule.features[steps]))
    slower = counts[:, steps] @ gradients.numpy()  # [metrics, kinds] seconds
    records = []
    for metric, value, per_kind in zip(metrics, values, slower, strict=True):
        known = not np.isnan(value)
        record: dict[str, Any] = {"metric": metric, "value_ms": 1e3 * value if known else None}
        for kind, each in zip(ALL_KINDS, per_kind, strict=True):
            signed = -each if kind in RATE_KINDS else each
            record[f"elasticity_{kind}"] = float(signed) / value if known else None
        record["elasticity_all"] = float(per_kind.sum()) / value if known else None
        records.append(record)
    return records
