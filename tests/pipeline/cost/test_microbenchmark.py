"""Calibration from microbenchmarks: tables of a tiny CPU run, and constants found again in timings made from them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import torch

from pipeline.cost import defaults, microbenchmark
from pipeline.cost.attention import DecodeAttention, PrefillAttention
from pipeline.cost.calibrate_attention import _prefill_rows
from pipeline.cost.fit import column
from pipeline.cost.gemm import Gemm
from pipeline.cost.microbenchmark import FULL, QUICK, allreduce_rank, calibration_from, device_of, measure
from pipeline.cost.model import FEATURES, StepCostModel
from pipeline.cost.shapes import rank_shapes
from pipeline.cost.traffic import Traffic
from schemas import hardware
from schemas.calibration import read_calibration
from schemas.errors import CatalogError

GPU = hardware.gpu("h100-sxm")
KEYS = {
    "gemm": ["tokens", "outputs", "inputs"],
    "decode": ["batch", "q_heads", "kv_heads", "head_dim", "context"],
    "prefill": ["batch", "q_heads", "kv_heads", "head_dim", "prompt_tokens"],
    "dense": ["layer", "tokens"],
}
BANDWIDTH, TFLOPS, LINK = 2000.0, 500.0, 150.0


@pytest.fixture(scope="module")
def measured():
    said = []
    return measure("cpu", quick=True, say=said.append), said


@pytest.fixture(scope="module")
def made():
    """Timings on FULL's shapes (fewer tokens) by the laws with constants that the fits don't start from."""
    changed = {"bandwidth_gb_s": BANDWIDTH, "launch_us": 6.0}
    gemm = Gemm(defaults.gemm(GPU, "bf16").model_copy(update=changed | {"tflops": TFLOPS}), GPU.sms)
    decode = DecodeAttention(defaults.decode(GPU).model_copy(update=changed), GPU.sms)
    slower = {"unit_us": 1.5 * defaults.attention(GPU).unit_us}
    prefill = PrefillAttention(defaults.attention(GPU).model_copy(update=slower), GPU.sms, GPU.l2_mb)
    dense = Traffic(defaults.pointwise(GPU).model_copy(update=changed), GPU.l2_mb)
    moved = {"layernorm": 4 * 4096 * 2, "rotary_emb": 2 * 40 * 128 * 2, "act_fn": 3 * 14336 * 2}

    def frame(rows, keys):
        return pl.DataFrame(rows, schema=keys, orient="row")

    matrices = frame(
        [(n, *shape) for shape in FULL.matrices for n in (1, 8, 32, 64, 128, 256, 1024, 4096)], KEYS["gemm"]
    ).sort("outputs", "inputs", "tokens")
    tokens, outputs, inputs = (column(matrices, name) for name in KEYS["gemm"])
    calls = frame(
        [(n, *heads, c) for heads in FULL.heads[:3] for n in (1, 2, 8, 32, 64) for c in (512, 2048, 8192)],
        KEYS["decode"],
    )
    n, _, kv, width, context = (column(calls, name) for name in KEYS["decode"])
    prompts = frame([(n, *h, p) for h in FULL.heads for n in (1, 4) for p in (64, 256, 1024, 4096)], KEYS["prefill"])
    kernels = frame([(layer, 2**k) for layer in moved for k in range(15)], KEYS["dense"])
    links = frame([(ranks, 2**k) for ranks in (2, 4) for k in range(13, 27)], ["gpus", "bytes"])
    share = 2.0 * (column(links, "gpus") - 1.0) / column(links, "gpus")
    bytes_moved = column(kernels, "tokens") * torch.tensor([float(moved[layer]) for layer in kernels["layer"]])
    with torch.no_grad():
        us = {
            "gemm": (matrices, gemm.law_us(tokens, outputs, inputs, 2.0)),
            "decode": (calls, decode.law_us(n, context, 4.0 * kv * width, kv)),
            "prefill": (prompts, prefill.us(*_prefill_rows(prompts))),
            "dense": (kernels, 1e6 * dense.seconds(bytes_moved, 1.0)),
            "allreduce": (links, 12.0 + share * column(links, "bytes") / (LINK * 1e3)),
        }
    return {part: table.with_columns(us=pl.Series(times.numpy())) for part, (table, times) in us.items()}


@pytest.fixture(scope="module")
def fitted(made):
    device = pl.DataFrame(
        [("NVIDIA Test", "cuda", "2.13.0+cu130", "fp16", 100, 4, "2026-01-02")],
        schema=["device", "kind", "torch", "dtype", "sms", "gpus", "date"],
        orient="row",
    )
    return calibration_from(made | {"device": device}, GPU, name="h100-here", engine="torch")


def test_a_quick_run_measures_every_part_and_says_what_it_skipped(measured):
    tables, said = measured
    assert set(tables) == {"device", *KEYS}
    for part, keys in KEYS.items():
        assert tables[part].columns == [*keys, "us"]
        assert (tables[part]["us"] > 0.0).all() and tables[part]["us"].is_finite().all()
        assert not tables[part].select(keys).is_duplicated().any()
    assert tables["gemm"].height == len(QUICK.matrices) * len(QUICK.tokens)
    assert (
        tables["device"].row(0, named=True).items()
        >= {"kind": "cpu", "torch": torch.__version__, "dtype": "bf16"}.items()
    )
    assert "allreduce: skipped, it takes two GPUs" in said


def test_what_does_not_fit_the_room_is_left_out():
    bench = microbenchmark.Bench(torch.device("cpu"), torch.bfloat16, QUICK, room=600e3, cache=1.0)
    assert set(bench.gemm()["inputs"]) == {256, 512} and (512, 512) not in set(
        bench.gemm().select("outputs", "inputs").iter_rows()
    )
    assert bench.decode()["context"].max() < 256 * 4 and bench.decode().height < 12


def test_buffers_outgrow_the_cache():
    bench = microbenchmark.Bench(torch.device("cpu"), torch.bfloat16, QUICK, room=1e9, cache=50e6)
    assert [bench._copies(size) for size in (1e3, 8e6, 50e6, 1e9)] == [256, 19, 3, 1]


def test_constants_are_found_again(fitted):
    gemm = fitted.gemm["bf16"]
    assert gemm.bandwidth_gb_s == pytest.approx(BANDWIDTH, rel=0.03)
    assert gemm.tflops == pytest.approx(TFLOPS, rel=0.05)
    assert fitted.decode.bandwidth_gb_s == pytest.approx(BANDWIDTH, rel=0.03)
    assert fitted.attention.unit_us == pytest.approx(1.5 * defaults.attention(GPU).unit_us, rel=0.05)
    assert fitted.pointwise.bandwidth_gb_s == pytest.approx(BANDWIDTH, rel=0.03)
    assert {ranks: term.link_gb_s for ranks, term in fitted.allreduce.items()} == {
        2: pytest.approx(LINK, rel=0.02),
        4: pytest.approx(LINK, rel=0.02),
    }


def test_errors_are_measured_on_shapes_that_were_not_fitted(fitted):
    assert {(each.part, each.split) for each in fitted.held_out} == {
        ("gemm bf16", "half of the shapes"),
        ("attention, prefill", "half of the head shapes"),
        ("attention, decode calls", "every other batch size"),
        ("attention, decode calls", "other head shapes"),
        ("pointwise kernels", "half of the sizes"),
        ("allreduce", "every second size"),
    }
    assert all(each.rows > 0 and each.median < 0.05 for each in fitted.held_out)


def test_a_calibration_says_where_it_is_from_and_what_it_lacks(fitted):
    assert fitted.sources == ("torch 2.13.0+cu130 on NVIDIA Test, 2026-01-02, fp16",)
    notes = " | ".join(fitted.notes)
    assert "not the engine's kernel" in notes
    assert "not measured, so at the data sheet's defaults: sampler, experts, gemm of fp8" in notes
    assert "torch counts 100 multiprocessors on NVIDIA Test, the catalogue 132 on h100-sxm" in notes
    assert "measured at fp16, in place of bf16" in notes


def test_a_calibration_round_trips_and_builds_a_cost_model(fitted, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(fitted.model_dump_json(), encoding="utf-8")
    assert read_calibration(file) == fitted
    model = StepCostModel(GPU, rank_shapes(hardware.model("llama-3.1-8b"), 2, "bf16", "bf16"), calibration=fitted)
    assert set(model.missing) == {"sampler", "experts bf16"}
    step = dict.fromkeys(FEATURES, 0.0) | {"sampled": 8.0, "decode_rows": 8.0, "decode_tokens": 8.0}
    step |= {"decode_context": 8e3, "decode_longest": 1e3, "tiles_most": 1.0}
    with torch.no_grad():
        seconds = model(torch.tensor([list(step.values())], dtype=torch.float64))
    half_of_the_weights = 7e9 / (BANDWIDTH * 1e9)  # seconds to read one rank's at bf16
    assert half_of_the_weights < float(seconds.sum()) < 3 * half_of_the_weights


def test_a_part_without_a_table_is_left_out(measured):
    tables, _ = measured
    calibration = calibration_from({part: tables[part] for part in ("device", "dense")}, GPU, name="x")
    assert calibration.pointwise is not None and not calibration.gemm and calibration.decode is None
    assert "measured on a CPU, to test the program: these constants are no GPU's" in calibration.notes
    assert any("defaults: gemm, attention, decode, sampler, experts, allreduce" in note for note in calibration.notes)


def test_an_all_reduce_of_one_process_writes_its_timings(tmp_path):
    allreduce_rank(0, 1, "gloo", str(tmp_path), (1024, 4096))
    taken = json.loads((tmp_path / "us.json").read_text())
    assert len(taken) == 2 and min(taken) > 0.0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "meta", "cpu:0"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(CatalogError, match="unknown device") as error:
        device_of(name)
    assert_one_line(error)


def test_no_gpu_no_memory_and_no_full_run_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CatalogError, match="sees no CUDA device; install") as error:
        measure("cuda")
    assert_one_line(error)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (device_of("cuda"), device_of("cuda:1")) == (torch.device("cuda", 0), torch.device("cuda", 1))
    with pytest.raises(CatalogError, match="no device cuda:2; torch sees 2"):
        device_of("cuda:2")
    with pytest.raises(CatalogError, match="hours on a CPU; use --quick"):
        measure("cpu")
    with pytest.raises(CatalogError, match="unknown dtype 'int4'; use bf16 or fp16"):
        measure("cpu", dtype="int4", quick=True)
    monkeypatch.setattr(microbenchmark, "free_bytes", lambda device: 2**20)
    with pytest.raises(CatalogError, match=r"0\.00 GiB free on cpu, 0\.25 needed; end other") as error:
        measure("cpu", quick=True)
    assert_one_line(error)


def test_timings_that_are_zero_or_absent_are_refused(made, monkeypatch):
    zero = made["decode"].with_columns(us=pl.when(pl.col("batch") == 8).then(0.0).otherwise("us"))
    for tables, fault in (
        (made | {"decode": zero}, "a timing of zero in decode"),
        ({"gemm": made["gemm"].clear()}, "no timings in gemm"),
        ({}, "no timings to calibrate from"),
    ):
        with pytest.raises(CatalogError, match=fault) as error:
            calibration_from(tables, GPU, name="x")
        assert_one_line(error)
    monkeypatch.setattr(microbenchmark, "cpu_us", lambda work: 0.0)
    with pytest.raises(CatalogError, match="a timing of zero on cpu"):
        microbenchmark.each_us([lambda: None], torch.device("cpu"), 3)


def test_on_cuda_a_graph_of_calls_is_timed_by_events(monkeypatch):
    """The order of things, with a stand-in for the driver: 1 ms between any two events."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, stop):
            return 1.0

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            log.append("wait_stream")

    for name, fake in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph: nullcontext(),
        "CUDAGraph": Graph,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    calls = [partial(log.append, place) for place in range(3)]
    # 1 ms for three calls, so 6 of them in a graph of 2 ms, which takes 1 ms.
    assert microbenchmark.each_us(calls, torch.device("cuda", 0), 3) == pytest.approx(1000.0 / 6)
    warm_up = ["wait_stream", 0, 1, 2, "record", 0, 1, 2, "record", "wait", "wait_stream"]
    assert log == [*warm_up, 0, 1, 2, 0, 1, 2, "replay", *["record", "replay", "record", "wait"] * 3]


def test_all_reduce_takes_every_power_of_two_of_gpus_and_fails_in_one_line(monkeypatch):
    def fake_spawn(function, arguments, nprocs):
        ranks, backend, folder, sizes = arguments
        assert (function, ranks, backend) == (allreduce_rank, nprocs, "nccl")
        Path(folder, "us.json").write_text(json.dumps([float(ranks)] * len(sizes)))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(microbenchmark, "spawn", fake_spawn)
    table = microbenchmark._allreduce((1024, 4096))
    assert table.rows() == [(2, 1024, 2.0), (2, 4096, 2.0), (4, 1024, 4.0), (4, 4096, 4.0)]

    def broken(function, arguments, nprocs):
        raise microbenchmark.ProcessException("\n-- Process 0 terminated:\nRuntimeError: NCCL error", 0, 1)

    monkeypatch.setattr(microbenchmark, "spawn", broken)
    with pytest.raises(CatalogError, match=r"over 2 GPUs failed \(RuntimeError: NCCL error\); leave it out") as error:
        microbenchmark._allreduce((1024,))
    assert_one_line(error)


def assert_one_line(error):
    line = str(error.value)
    assert "\n" not in line and "; " in line  # the fault; its mend
