"""A calibration of the GPU that is here, from microbenchmarks through torch: `measure` times kernels, `calibration_from` fits them.

What is timed, and which data lie in the cache when a kernel starts, as in an engine's step:

    gemm       tokens x inputs times weights [outputs, inputs]; weights rotate through more than the cache holds
    decode     scaled_dot_product_attention, one query per sequence, grouped heads; KV rotates likewise
    prefill    the same, causal, whole prompts
    dense      kernels that only move data, with the traffic of a Llama-3.1-8B layer's norms, rotary embedding and activation:
               layer norm, negation and product of torch; their data stay in the cache where they fit
    allreduce  NCCL over 2, 4, 8 GPUs, one process each, where torch sees several

On CUDA every figure is the median over replays of a graph of many such calls (CUDA events, after a warm-up), so that no launch by
the host is in it, as engines decode. On the CPU, for tests of the program, calls are timed by the clock. Times in microseconds.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal

import polars as pl
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.cost import defaults
from pipeline.cost.attention import DecodeAttention
from pipeline.cost.calibrate import fit_gemm
from pipeline.cost.calibrate_attention import fit_decode_profile, fit_prefill_attention
from pipeline.cost.calibrate_parts import fit_allreduce, fit_pointwise
from pipeline.cost.fit import column, held_out
from pipeline.cost.shapes import Attention
from schemas.calibration import Calibration, DecodeTerm, HeldOut
from schemas.errors import CatalogError
from schemas.hardware import GIB, Gpu

Say = Callable[[str], None]
Call = Callable[[], object]
Dtype = Literal["bf16", "fp16"]
Tables = dict[str, pl.DataFrame]
Heads = tuple[int, int, int]  # query heads, KV heads, width of a head

TORCH_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

REFERENCE_HEADS: Heads = (32, 8, 128)  # the decode term is fitted to them, with a residual; other heads test it

WIDTHS = {"layernorm": 2 * 4096, "rotary_emb": 40 * 128, "act_fn": 14336}
"""Elements per token that a kernel writes; what it moves in all: `fit_pointwise`."""


@dataclass(frozen=True)
class Grid:
    """What is timed. Matrices are (outputs, inputs), messages bytes, `least` the bytes that must be free."""

    matrices: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    heads: Sequence[Heads]
    sequences: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int]
    prompts: Sequence[int]
    dense_tokens: Sequence[int]
    messages: Sequence[int]
    repeats: int
    least: int


FULL = Grid(
    matrices=(
        (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192),  # Llama-3.2-1B: query-key-value, output, gate-up, down
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),  # Llama-3.1-8B, its LM head
        (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944),  # Qwen2.5-7B
        (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),  # Llama-3.1-70B
        (2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168),  # its quarters (tensor parallel 4)
        (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192),  # its eighths, LM head
    ),
    tokens=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    heads=(REFERENCE_HEADS, (32, 32, 128), (64, 8, 128), (28, 4, 128), (16, 2, 128), (8, 1, 128), (32, 8, 64)),
    sequences=(1, 2, 4, 8, 16, 32, 64, 128, 256), contexts=(128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    batches=(1, 4), prompts=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    dense_tokens=tuple(2**power for power in range(15)), messages=tuple(2**power for power in range(13, 27)),
    repeats=7, least=4 * GIB,
)  # fmt: skip
QUICK = Grid(
    matrices=((256, 256), (256, 512), (512, 256), (512, 512)), tokens=(1, 16, 64), heads=(REFERENCE_HEADS, (8, 2, 64)),
    sequences=(1, 2, 4), contexts=(64, 256), batches=(1,), prompts=(64, 128), dense_tokens=(1, 4, 16, 64),
    messages=(2**13, 2**17, 2**21), repeats=3, least=GIB // 4,
)  # fmt: skip

MOST_KV_TOKENS = 2**20  # sequences x context of one decode call
CACHE_TIMES = 3.0  # rotating buffers are at least so many times the cache together
GRAPH_US, MOST_CALLS = 2000.0, 200  # about how long one graph of calls runs, and how many they are at most


def cuda_us(work: Call) -> float:
    """Microseconds between CUDA events around `work` on the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return 1e3 * float(start.elapsed_time(stop))


def cpu_us(work: Call) -> float:
    """Microseconds of `work` by the clock."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) * 1e-3


def each_us(calls: Sequence[Call], device: torch.device, repeats: int) -> float:
    """Microseconds of one of `calls`, which run one after the other on their own data: the median of `repeats` timings.

    Raises CatalogError where that is zero.
    """
    if device.type == "cuda":
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # kernels are chosen and their workspaces made before the capture
            for call in calls[:3]:
                call()
            once = cuda_us(lambda: [call() for call in calls]) / len(calls)
        torch.cuda.current_stream(device).wait_stream(side)
        count = max(len(calls), min(MOST_CALLS, math.ceil(GRAPH_US / max(once, 1.0))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for place in range(count):
                calls[place % len(calls)]()
        graph.replay()
        us = median(cuda_us(graph.replay) for _ in range(repeats)) / count
    else:
        taken = [cpu_us(lambda: [call() for call in calls]) for _ in range(1 + repeats)]
        us = median(taken[1:]) / len(calls)
    if not us > 0.0:
        raise CatalogError(f"a timing of zero on {device}", mend="measure again; the clock didn't advance")
    return us


class Bench:
    """The timings of one device. `room`: bytes that buffers may take, what needs more is left out; `cache`: bytes of L2."""

    def __init__(self, device: torch.device, dtype: torch.dtype, grid: Grid, *, room: float, cache: float) -> None:
        self.device, self.dtype, self.grid, self.room, self.cache = device, dtype, grid, room, cache

    def _us(self, calls: Sequence[Call]) -> float:
        return each_us(calls, self.device, self.grid.repeats)

    def _random(self, *shape: int) -> Tensor:
        # Not zeros: a GPU runs those at a higher clock.
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _copies(self, size: float) -> int:
        """How many buffers of `size` bytes outgrow the cache."""
        return max(1, min(256, math.ceil(CACHE_TIMES * self.cache / size)))

    def gemm(self) -> pl.DataFrame:
        """tokens, outputs, inputs, us."""
        most, rows = self.grid.tokens[-1], []
        for outputs, inputs in self.grid.matrices:
            size = 2.0 * outputs * inputs
            copies = self._copies(size)
            if size * copies + 2.0 * most * (inputs + outputs) > self.room:
                continue
            weights = [self._random(outputs, inputs).t() for _ in range(copies)]
            x, y = self._random(most, inputs), self._random(most, outputs)
            for n in self.grid.tokens:
                us = self._us([_bound(torch.mm, x[:n], weight, out=y[:n]) for weight in weights])
                rows.append((n, outputs, inputs, us))
        return _table("tokens outputs inputs", rows).sort("outputs", "inputs", "tokens")

    def decode(self) -> pl.DataFrame:
        """batch, q_heads, kv_heads, head_dim, context, us: the whole grid for REFERENCE_HEADS, a ninth of it for others."""
        rows = []
        for heads in self.grid.heads:
            q_heads, kv_heads, width = heads
            stride = 1 if heads == REFERENCE_HEADS else 3
            for batch, context in product(self.grid.sequences[::stride], self.grid.contexts[::stride]):
                size = 4.0 * batch * kv_heads * width * context
                copies = self._copies(size)
                if batch * context > MOST_KV_TOKENS or size * copies > self.room:
                    continue
                query = self._random(batch, q_heads, 1, width)
                cached = [self._random(2, batch, kv_heads, context, width) for _ in range(copies)]
                us = self._us([_bound(_attend, query, key, value) for key, value in cached])
                rows.append((batch, *heads, context, us))
        return _table("batch q_heads kv_heads head_dim context", rows)

    def prefill(self) -> pl.DataFrame:
        """batch, q_heads, kv_heads, head_dim, prompt_tokens, us."""
        rows = []
        for heads, batch, prompt in product(self.grid.heads, self.grid.batches, self.grid.prompts):
            q_heads, kv_heads, width = heads
            size = 4.0 * batch * prompt * (q_heads + kv_heads) * width
            if batch * prompt > self.grid.prompts[-1] or size > self.room:
                continue
            query = self._random(batch, q_heads, prompt, width)
            key, value = self._random(2, batch, kv_heads, prompt, width)
            rows.append((batch, *heads, prompt, self._us([_bound(_attend, query, key, value, causal=True)])))
        return _table("batch q_heads kv_heads head_dim prompt_tokens", rows)

    def dense(self) -> pl.DataFrame:
        """layer, tokens, us: of `WIDTHS`."""
        rows = []
        for layer, width in WIDTHS.items():
            for n in (each for each in self.grid.dense_tokens if 6.0 * each * width <= self.room):
                a, b, c = (self._random(n, width) for _ in range(3))
                call = {
                    "layernorm": _bound(functional.layer_norm, a.view(2 * n, width // 2), (width // 2,)),
                    "rotary_emb": _bound(torch.neg, a, out=c),
                    "act_fn": _bound(torch.mul, a, b, out=c),
                }[layer]
                rows.append((layer, n, self._us([call])))
        return pl.DataFrame(rows, schema={"layer": pl.String, "tokens": pl.Int64, "us": pl.Float64}, orient="row")


def _bound(function: Callable[..., object], *arguments: object, **named: object) -> Call:
    return lambda: function(*arguments, **named)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def _table(keys: str, rows: Sequence[tuple[float, ...]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=dict.fromkeys(keys.split(), pl.Int64) | {"us": pl.Float64}, orient="row")


def device_of(name: str) -> torch.device:
    """`cpu`, `cuda` (the first GPU) or `cuda:N`. Raises CatalogError where torch has no such device."""
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise CatalogError(f"unknown device '{name}'", mend="use cuda, cuda:N or cpu")
    if not torch.cuda.is_available():
        mend = "install a build of torch for your GPU, and check that `nvidia-smi` lists it"
        raise CatalogError(f"torch {torch.__version__} sees no CUDA device", mend=mend)
    if int(index or 0) >= torch.cuda.device_count():
        raise CatalogError(f"no device {name}", mend=f"torch sees {torch.cuda.device_count()}, counted from 0")
    return torch.device("cuda", int(index or 0))


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(device: str, *, dtype: Dtype = "bf16", quick: bool = False, say: Say = lambda _line: None) -> Tables:
    """Time the kernels on `device`; minutes on a GPU, seconds with `quick` (a tiny grid, to test the program).

    Tables with the columns and units of `measurements.py`: gemm, prefill, decode, dense, allreduce; those that couldn't be
    measured are left out, and said. `device`, one row, says on what: device, kind, torch, dtype, sms, gpus, date.

    Raises CatalogError: no such device, too little memory, a timing of zero.
    """
    where, grid = device_of(device), QUICK if quick else FULL
    on_gpu = where.type == "cuda"
    if dtype not in TORCH_DTYPES:
        raise CatalogError(f"unknown dtype '{dtype}'", mend=f"use {' or '.join(TORCH_DTYPES)}")
    if not on_gpu and not quick:
        raise CatalogError("the full grid takes hours on a CPU", mend="use --quick, or --device cuda")
    free = free_bytes(where)
    if free < grid.least:
        lack = f"{free / GIB:.2f} GiB free on {where}, {grid.least / GIB:.2f} needed"
        raise CatalogError(lack, mend="end other programs on it")
    tables = {"device": _device_table(where, dtype)}
    say(f"device: {tables['device']['device'][0]}, torch {torch.__version__}")
    with torch.cuda.device(where) if on_gpu else nullcontext():
        if torch.cuda.device_count() > 1 and on_gpu:  # first: it may fail
            tables["allreduce"] = _allreduce(grid.messages)
            say(f"allreduce: {tables['allreduce'].height:,} timings")
        else:
            say("allreduce: skipped, it takes two GPUs")
        # On the CPU nothing rotates.
        cache = getattr(torch.cuda.get_device_properties(where), "L2_cache_size", 128e6) if on_gpu else 1.0
        bench = Bench(where, TORCH_DTYPES[dtype], grid, room=0.5 * free, cache=cache)
        parts = ["gemm", "dense", "decode", "prefill"]
        if on_gpu and not _attention_fused(bench):
            say("decode, prefill: skipped, torch has no fused attention with grouped heads for this GPU")
            del parts[2:]
        for part in parts:
            try:
                with torch.inference_mode(), sdpa_kernel(FUSED) if on_gpu else nullcontext():
                    tables[part] = getattr(bench, part)()
            except torch.OutOfMemoryError:
                raise CatalogError(f"{where} ran out of memory at {part}", mend="end other programs on it") from None
            say(f"{part}: {tables[part].height:,} timings")
    return tables


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Not the kernel that writes out all scores."""


def _attention_fused(bench: Bench) -> bool:
    """Whether one of FUSED takes grouped heads here."""
    q_heads, kv_heads, width = REFERENCE_HEADS
    query = torch.ones(1, q_heads, 64, width, device=bench.device, dtype=bench.dtype)
    with warnings.catch_warnings(), sdpa_kernel(FUSED):
        warnings.simplefilter("ignore")  # why each kernel was refused
        try:
            _attend(query, query[:, :kv_heads], query[:, :kv_heads], causal=True)
        except RuntimeError:
            return False
    return True


def _device_table(device: torch.device, dtype: str) -> pl.DataFrame:
    named, sms, gpus = platform.processor() or platform.machine(), 0, 0
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        named, sms, gpus = found.name, found.multi_processor_count, torch.cuda.device_count()
    row = (named, device.type, torch.__version__, dtype, sms, gpus, datetime.date.today().isoformat())
    return pl.DataFrame([row], schema=["device", "kind", "torch", "dtype", "sms", "gpus", "date"], orient="row")


def _allreduce(sizes: Sequence[int]) -> pl.DataFrame:
    """gpus, bytes, us over 2, 4, 8 of the visible GPUs. Raises CatalogError where NCCL fails."""
    rows: list[tuple[float, ...]] = []
    for ranks in (each for each in (2, 4, 8) if each <= torch.cuda.device_count()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                spawn(allreduce_rank, (ranks, "nccl", folder, sizes), nprocs=ranks)  # type: ignore[no-untyped-call]
            except ProcessException as problem:
                fault = f"all-reduce over {ranks} GPUs failed ({str(problem).strip().splitlines()[-1]})"
                raise CatalogError(fault, mend="leave it out with CUDA_VISIBLE_DEVICES=0") from None
            measured = json.loads((Path(folder) / "us.json").read_text(encoding="utf-8"))
        rows += [(ranks, size, us) for size, us in zip(sizes, measured, strict=True)]
    return _table("gpus bytes", rows)


def allreduce_rank(rank: int, ranks: int, backend: str, folder: str, sizes: Sequence[int]) -> None:
    """One process of an all-reduce: the first writes microseconds of each of `sizes` (bytes) to `folder`/us.json."""
    from torch import distributed

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, patience = (Path(folder) / "store").as_uri(), datetime.timedelta(minutes=3)
    distributed.init_process_group(backend, store, timeout=patience, world_size=ranks, rank=rank)
    found = []
    for size in sizes:
        message = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)

        def many(message: Tensor = message) -> None:
            for _ in range(20):
                distributed.all_reduce(message)

        taken = [
            (cuda_us if device.type == "cuda" else cpu_us)(many) / 20 for _ in range(6)
        ]  # the first is the warm-up
        found.append(median(taken[1:]))
    if rank == 0:
        (Path(folder) / "us.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


NOTES = {
    "gemm": "gemm: cuBLAS through torch.mm, weights from memory; engines mostly call the same library",
    "attention": "attention: torch's scaled_dot_product_attention, not the engine's kernel; calls that mix prefill and decode, "
    "or come after a cached prefix, weren't measured: their constants stay at the defaults",
    "decode": "decode: torch's scaled_dot_product_attention on contiguous KV, not the engine's kernel on paged KV",
    "pointwise": "pointwise: torch's layer norm, negation and product for fused norms, rotary embedding and activation",
    "allreduce": "allreduce: NCCL, launched one by one; engines have faster kernels of their own for small messages",
}


def calibration_from(
    tables: Tables, gpu: Gpu, *, name: str, engine: str = "torch", say: Say = lambda _line: None
) -> Calibration:
    """Fit what `measure` found on `gpu` (Adam): half of the shapes for the held-out error, then all of them for use.

    Parts without a table are left out of the calibration: the program takes them from `defaults` and names them.
    Raises CatalogError: no timings, a timing of zero.
    """
    if set(tables) <= {"device"}:
        raise CatalogError("no timings to calibrate from", mend="measure a GPU first")
    for part, table in tables.items():
        if part != "device" and (table.height == 0 or not (table["us"].is_finite() & (table["us"] > 0.0)).all()):
            fault = "a timing of zero" if table.height else "no timings"
            raise CatalogError(f"{fault} in {part}", mend="measure again, with nothing else on the GPU")
    errors: list[HeldOut] = []
    fits: dict[str, tuple[str, Callable[[pl.DataFrame], object]]] = {
        "gemm": ("gemm", lambda table: {"bf16": fit_gemm(table, gpu, "bf16", errors)}),
        "attention": ("prefill", lambda table: fit_prefill_attention(table, gpu, errors)),
        "decode": ("decode", lambda table: _fit_decode(table, gpu, errors)),
        "pointwise": ("dense", lambda table: fit_pointwise(table, gpu, errors)),
        "allreduce": ("allreduce", lambda table: fit_allreduce(table, errors)),
    }
    parts: dict[str, object] = {}
    for part, (measured, fit) in fits.items():
        if measured in tables:
            say(f"fitting {part}")
            parts[part] = fit(tables[measured])
    source, notes = _described(tables, gpu, parts)
    about = {"name": name, "gpu": gpu.name, "engine": engine, "sources": (source,), "notes": notes}
    return Calibration.model_validate(about | parts | {"host": defaults.HOST, "held_out": tuple(errors)})


def _fit_decode(table: pl.DataFrame, gpu: Gpu, errors: list[HeldOut]) -> DecodeTerm:
    """The law with its residual, from REFERENCE_HEADS; other heads are held out."""
    by_heads, predicted, measured = dict(table.group_by("q_heads", "kv_heads", "head_dim", maintain_order=True)), [], []
    profile = by_heads.pop(REFERENCE_HEADS).with_columns(prefill_chunk=pl.lit(0), kv_decode=pl.col("context") - 1)
    term = fit_decode_profile(profile.rename({"batch": "n_decode"}).drop("context"), gpu, errors)
    for (q, kv, width), rows in by_heads.items():
        shape = Attention(1, q, kv, q / kv, 4.0 * kv * width, 4.0 * width)
        with torch.no_grad():
            predicted.append(DecodeAttention(term, gpu.sms).us(shape, column(rows, "batch"), column(rows, "context")))
        measured.append(column(rows, "us"))
    if predicted:
        split = ("attention, decode calls", "other head shapes")
        errors.append(held_out(*split, torch.cat(predicted), torch.cat(measured)))
    return term


def _described(tables: Tables, gpu: Gpu, parts: dict[str, object]) -> tuple[str, tuple[str, ...]]:
    """Where the timings are from, and what is to be known about them."""
    notes = [note for part, note in NOTES.items() if part in parts]
    known = ("gemm", "attention", "decode", "pointwise", "sampler", "experts", "allreduce")
    absent = [part for part in known if part not in parts]
    notes.append(f"not measured, so at the data sheet's defaults: {', '.join(absent)}, gemm of fp8")
    if "device" not in tables:
        return "timings through torch", tuple(notes)
    row = tables["device"].row(0, named=True)
    if row["kind"] == "cpu":
        notes.append("measured on a CPU, to test the program: these constants are no GPU's")
    elif row["sms"] != gpu.sms:
        counted = f"torch counts {row['sms']} multiprocessors on {row['device']}"
        notes.append(f"{counted}, the catalogue {gpu.sms} on {gpu.name}: it may be another GPU")
    if row["dtype"] != "bf16":
        notes.append(f"measured at {row['dtype']}, in place of bf16")
    return f"torch {row['torch']} on {row['device']}, {row['date']}, {row['dtype']}", tuple(notes)
