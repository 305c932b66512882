"""How far the cost model is off: operators held out from the fits, and whole serving runs that nothing was fitted to.

`make accuracy` prints both. The runs are replayed with the engine's own settings and the shipped calibrations, made from operator
timings alone. Data and licences: benchmarks/measurements/README.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.measure import print_table
from pipeline.cost.build import build_hardware
from pipeline.cost.calibrate import calibrate_operators
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from schemas import hardware
from schemas.calibration import Calibration, shipped
from schemas.study import Scenario

MEASUREMENTS = Path(__file__).parent / "measurements"

SOURCES = {
    # GPU: how the database and the profile name it, the engine whose kernels were timed
    "rtx-4090": ("rtx4090", "rtx4090", "vllm-0.19"),
    "rtx-pro-6000": ("rtx_pro_6000_server", "rtxpro6000", "vllm-0.19"),
    "h100-sxm": ("h100_sxm", None, "vllm-0.24"),
    "h200": ("h200_sxm", None, "vllm-0.24"),
    "b200": ("b200_sxm", None, "vllm-0.24"),
    "l40s": ("l40s", None, "vllm-0.24"),
    "a100-80g": ("a100_sxm", None, "vllm-0.14"),
}


@dataclass(frozen=True)
class ServingRun:
    """A real vLLM run: its requests, and what the engine was told."""

    name: str
    gpu: str
    model: str
    max_sequences: int
    max_batched_tokens: int
    max_model_len: int
    pool_blocks: int | None  # null = not logged: what the capacity model says
    table: pl.DataFrame

    @property
    def observed(self) -> dict[str, NDArray[np.float64]]:
        """TTFT, TPOT and latency of each request, seconds, from its arrival."""
        table = self.table
        ttft = (table["first_token_s"] - table["arrival_s"]).to_numpy()
        latency = (table["last_token_s"] - table["arrival_s"]).to_numpy()
        return {"TTFT": ttft, "TPOT": _tpot(latency - ttft, table), "latency": latency}


def _tpot(decode_s: NDArray[np.float64], table: pl.DataFrame) -> NDArray[np.float64]:
    tpot: NDArray[np.float64] = decode_s / np.maximum(1, table["output_tokens"].to_numpy() - 1)
    return tpot


def serving_runs() -> list[ServingRun]:
    """The runs under measurements/e2e."""
    runs = []
    gpus = {"rtx4090": "rtx-4090", "rtxpro6000": "rtx-pro-6000"}
    for file in sorted((MEASUREMENTS / "e2e").glob("*.parquet")):
        meta = json.loads(file.with_name(f"{file.stem}_meta.json").read_text())
        _, gpu, model = file.stem.split("_", 2)
        told = meta["engine_kwargs"]
        runs.append(
            ServingRun(
                name=file.stem,
                gpu=gpus[gpu],
                model=model,
                max_sequences=told["max_num_seqs"],
                max_batched_tokens=told["max_num_batched_tokens"],
                max_model_len=told["max_model_len"] or 131_072,
                pool_blocks=meta.get("kv_cache", {}).get("num_gpu_blocks"),
                table=pl.read_parquet(file).sort("arrival_s"),
            )
        )
    return runs


def predicted(run: ServingRun) -> dict[str, NDArray[np.float64]]:
    """The same by replay, nothing fitted to the run."""
    scenario = Scenario.model_validate(
        {
            "fleet": {"gpu": run.gpu, "replicas": 1},
            "model": {"name": run.model},
            "engine": {"max_batched_tokens": run.max_batched_tokens, "max_sequences": run.max_sequences},
        }
    )
    built = build_hardware(scenario)
    blocks = run.pool_blocks or built.capacity.pool_blocks
    ids = run.table["prefix_blocks_16"]
    arrivals = Arrivals(
        arrival_s=run.table["arrival_s"].to_numpy().copy(),
        input_tokens=run.table["input_tokens"].to_numpy().astype(np.int32),
        output_tokens=run.table["output_tokens"].to_numpy().astype(np.int32),
        block_offsets=np.concatenate([[0], np.cumsum(ids.list.len().to_numpy())]).astype(np.int64),
        block_ids=ids.explode().to_numpy().astype(np.uint32),
        trace_block_tokens=16,
    )
    config = EngineConfig(
        replicas=1,
        block_tokens=16,
        pool_blocks=blocks,
        max_batched_tokens=run.max_batched_tokens,
        max_sequences=run.max_sequences,
        max_model_len=min(run.max_model_len, blocks * 16),
        prefix_caching=True,
    )
    requests = replay(arrivals, config, built.lowered).requests
    ttft, latency = requests.first_token_s - arrivals.arrival_s, requests.finish_s - arrivals.arrival_s
    return {"TTFT": ttft, "TPOT": _tpot(latency - ttft, run.table), "latency": latency}


def errors(run: ServingRun) -> dict[str, float]:
    """Relative errors of the run's means and of its median TTFT."""
    real, ours = run.observed, predicted(run)
    means = {f"mean {name}": float(ours[name].mean() / real[name].mean() - 1) for name in real}
    return means | {"median TTFT": float(np.median(ours["TTFT"]) / np.median(real["TTFT"]) - 1)}


def recalibrated(gpu: str) -> Calibration:
    """The calibration of `gpu`, fitted again from the measurements in this repository."""
    database, profile, engine = SOURCES[gpu]
    return calibrate_operators(
        MEASUREMENTS / "ops", hardware.gpu(gpu), database, profile, name=f"{gpu}-{engine}", engine=engine
    )


def operator_rows(calibrations: list[Calibration]) -> list[list[str]]:
    """One row per part and split."""
    return [
        [each.gpu, held.part, held.split, f"{held.rows:,}", f"{held.median:.1%}", f"{held.p95:.1%}"]
        for each in calibrations
        for held in each.held_out
    ]


def documented_table() -> list[str]:
    """The held-out errors of the shipped calibrations as they stand in docs/cost-model.md, line by line."""
    rows = operator_rows(list(shipped().values()))
    return [
        "| GPU | part | held out | timings | median | 95th percentile |",
        "| --- | --- | --- | --- | --- | --- |",
    ] + [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--refit", action="store_true", help="fit every calibration again and write it where it is shipped"
    )
    if parser.parse_args().refit:
        folder = Path(hardware.__file__).parent / "catalog" / "calibrations"
        for gpu in SOURCES:
            (folder / f"{gpu}.json").write_text(recalibrated(gpu).model_dump_json() + "\n")
        shipped.cache_clear()
    print_table(
        "Operators that were not fitted: |predicted / measured - 1|",
        ("GPU", "part", "held out", "timings", "median", "95th percentile"),
        operator_rows(list(shipped().values())),
    )
    rows, scatter = [], []
    for run in serving_runs():
        found = errors(run)
        order = ("mean TTFT", "median TTFT", "mean TPOT", "mean latency")
        rows.append([run.name, f"{run.table.height}", *(f"{found[name]:+.1%}" for name in order)])
        real, ours = run.observed, predicted(run)
        for name in real:
            ratio = ours[name] / np.maximum(real[name], 1e-9) - 1
            quantiles = np.quantile(ratio, [0.05, 0.25, 0.5, 0.75, 0.95])
            scatter.append([run.name, name, *(f"{each:+.1%}" for each in quantiles)])
    print_table(
        "Whole runs of vLLM 0.19, replayed; nothing fitted to them",
        ("run", "requests", "mean TTFT", "median TTFT", "mean TPOT", "mean latency"),
        rows,
    )
    print_table(
        "The same request by request: quantiles of predicted / measured - 1",
        ("run", "latency", "5 %", "25 %", "50 %", "75 %", "95 %"),
        scatter,
    )


if __name__ == "__main__":
    main()
