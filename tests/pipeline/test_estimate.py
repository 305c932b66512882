"""`preplay estimate`: by hand, against the replay, and its elasticities against finite differences."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cost.build import build_hardware
from pipeline.cost.elasticity import KINDS, LIMITS, RATE_KINDS, RATIOS, TIME_KINDS, shares
from pipeline.cost.lowered import step_components
from pipeline.cost.model import FEATURES
from pipeline.estimate import (
    ELASTICITIES,
    PARTS,
    decode_step,
    estimate,
    prefill_step,
    scenario_of,
    ttft_seconds,
)
from pipeline.replay.engine import Arrivals, EngineConfig, replay
from pipeline.replay.scheduler import tiles_and_units
from schemas import hardware
from schemas.errors import CapacityError, CatalogError, PreplayError, StudyError
from schemas.hardware import GIB
from schemas.outcome import COMPONENTS
from tests.conftest import DATA, ROOT

PLAIN = scenario_of("llama-3.1-8b", "h100-sxm", calibration="none")
SCENARIOS = {
    "plain": PLAIN,
    "calibrated": scenario_of("llama-3.1-8b", "h100-sxm"),
    "group": scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4, weight_dtype="fp8", kv_dtype="fp8"),
    "int4": scenario_of("llama-3.1-70b", "a100-80g", weight_dtype="int4"),
    "experts": scenario_of("qwen3-30b-a3b", "h200"),
    "latent": scenario_of("deepseek-v3", "h200", tensor_parallel=8, weight_dtype="fp8"),
    "windowed": scenario_of(str(DATA / "hf/gemma-2-9b.json"), "l40s"),
    "profiled": scenario_of("llama-3.1-8b", "rtx-4090"),
    "small chunks": scenario_of("llama-3.1-8b", "h100-sxm", max_batched_tokens=512, max_sequences=64),
}
EVERY = pytest.mark.parametrize("name", SCENARIOS)


def kinds_of(row):
    return {name.removeprefix("elasticity_"): row[name] for name in ELASTICITIES}


def preplay(arguments):
    """(stdout, stderr) of a command that succeeds."""
    done = CliRunner().invoke(app, shlex.split(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


# By hand


def test_memory_by_hand():
    """Llama 3.1 8B on an H100 of 79.6 GiB: 0.9 of it, less weights, activations of 8,192 tokens and 256 logits, 1 GiB."""
    summary, _ = estimate(PLAIN)
    attention = 4096 * 128 * (2 * 32 + 2 * 8)
    params = 32 * (attention + 3 * 4096 * 14336) + 2 * 4096 * 128256
    assert summary["weights_gib_per_gpu"] == pytest.approx(2 * params / GIB)
    activations = 8192 * (4 * 4096 + 3 * 14336) * 2 + 256 * 128256 * 4 * 2
    left = 0.9 * 79.6 * GIB - 2 * params - activations - GIB
    per_block = 16 * 32 * 2 * 8 * 128 * 2  # 16 tokens, 32 layers, K and V of 8 heads of 128, bf16: 2 MiB
    assert per_block == 2 * 1024**2
    blocks = int(left // per_block)
    assert summary["kv_pool_tokens"] == 16 * blocks
    assert summary["kv_pool_gib_per_gpu"] == blocks * per_block / GIB
    assert summary["sequences_of_1024_that_fit"] == blocks // 64
    assert summary["sequences_of_8192_that_fit"] == blocks // 512
    assert summary["rests_on"].startswith("h100-sxm not calibrated")


def test_a_group_divides_weights_and_kv():
    summary, rows = estimate(SCENARIOS["group"], [8], [1024])
    model = hardware.model("llama-3.1-70b")
    body, ends = model.params - 2 * model.head_params, 2 * model.head_params
    assert summary["weights_gib_per_gpu"] == pytest.approx((body * 1 + ends * 2) / 4 / GIB)
    # 80 layers x K and V x 2 heads of 128 x 1 byte: 40 KiB a token and GPU
    assert summary["kv_pool_gib_per_gpu"] * GIB == pytest.approx(summary["kv_pool_tokens"] * 40 * 1024)
    assert rows[0]["communication_percent"] > 0


def test_one_sequence_takes_its_weights_and_the_launches():
    """Everything but the embedding read at 0.88 of 3,350 GB/s; launches of 4 matrices and one attention a layer, and 4 kernels between."""
    _, (row,) = estimate(PLAIN, [1], [16])
    bytes_read = 2 * (32 * (4096 * 128 * 80 + 3 * 4096 * 14336) + 4096 * 128256)
    launches_us = 32 * (4 * 3 + 8 + 4 * 2) + 3 + 25  # LM head and sampler once
    assert row["tpot_ms"] == pytest.approx(1e3 * bytes_read / (0.88 * 3350e9) + 1e-3 * launches_us, rel=0.15)
    assert row["bound_by"] == "memory bandwidth"


def test_throughput_by_hand():
    scenario = scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4, replicas=3)
    _, (row,) = estimate(scenario, [16], [2048])
    assert row["tokens_s"] == pytest.approx(16 / (row["tpot_ms"] / 1e3))
    assert row["tokens_s_per_gpu"] == pytest.approx(row["tokens_s"] / 4)
    assert row["fleet_tokens_s"] == pytest.approx(row["tokens_s"] * 3)


@pytest.mark.parametrize(
    ("past", "tokens"), [(0, 1), (0, 64), (0, 129), (100, 64), (8192, 1), (1000, 130), (512, 4097)]
)
def test_prefill_tiles_are_the_schedulers(past, tokens):
    step = prefill_step(past, tokens)
    assert (step["prefill_tiles"], step["prefill_units"]) == tiles_and_units(past, tokens)


# Against the rest of the program


@EVERY
def test_a_row_is_the_lowered_step(name):
    scenario = SCENARIOS[name]
    lowered = build_hardware(scenario).lowered
    _, rows = estimate(scenario, [1, 3, 24], [1, 700, 5000])
    assert any(row["tpot_ms"] is not None for row in rows)
    for row in rows:
        if row["tpot_ms"] is None:
            continue
        step = decode_step(row["batch"], row["context"])
        parts = step_components(lowered, *(step.get(feature, 0) for feature in FEATURES))
        assert row["tpot_ms"] == pytest.approx(1e3 * sum(parts), rel=1e-6)
        by_name = dict(zip(COMPONENTS, parts, strict=True))
        for part, names in PARTS.items():
            expected = 100 * sum(by_name[each] for each in names) / sum(parts)
            assert row[f"{part}_percent"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert sum(row[f"{part}_percent"] for part in PARTS) == pytest.approx(100)


@EVERY
@pytest.mark.parametrize("prompt", [1, 513, 6 * 1024 + 1])
def test_a_prompt_takes_as_long_as_a_replay_of_it(name, prompt):
    """One request of two tokens: its TTFT is `ttft_ms`, the time to the second token `tpot_ms` at one token more than the prompt."""
    scenario = SCENARIOS[name]
    built = build_hardware(scenario)
    engine = scenario.engine
    arrivals = Arrivals(
        arrival_s=np.array([0.0]),
        input_tokens=np.array([prompt], np.int32),
        output_tokens=np.array([2], np.int32),
        block_offsets=np.zeros(2, np.int64),
        block_ids=np.zeros(0, np.uint32),
        trace_block_tokens=None,
    )
    config = EngineConfig(
        replicas=1,
        block_tokens=engine.block_tokens,
        pool_blocks=built.capacity.pool_blocks,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=min(hardware.model(scenario.model.name).max_context, built.capacity.pool_tokens),
    )
    replayed = replay(arrivals, config, built.lowered).requests
    _, (row,) = estimate(scenario, [1], [prompt + 1], prompt)
    assert row["ttft_ms"] == pytest.approx(1e3 * replayed.first_token_s[0], rel=1e-6)
    assert row["tpot_ms"] == pytest.approx(1e3 * (replayed.finish_s[0] - replayed.first_token_s[0]), rel=1e-6)


# Physics


def test_more_work_takes_longer():
    batches, contexts = (1, 2, 8, 32, 64, 128), (128, 1024, 2048, 3000)
    _, rows = estimate(PLAIN, batches, contexts)
    tpot = np.array([row["tpot_ms"] for row in rows]).reshape(len(contexts), len(batches))
    assert (np.diff(tpot, axis=0) > 0).all() and (np.diff(tpot, axis=1) > 0).all()
    ttft = [row["ttft_ms"] for row in rows if row["batch"] == 1]
    assert ttft == sorted(ttft) and len(set(ttft)) == len(ttft)


def test_smaller_chunks_take_longer():
    whole, small = build_hardware(PLAIN), build_hardware(SCENARIOS["small chunks"])
    assert ttft_seconds(small, 8192, 512) > ttft_seconds(whole, 8192, 8192)


# Elasticities


@pytest.mark.parametrize("gpu", hardware.gpus())
def test_every_constant_has_a_kind_or_no_unit(gpu):
    """A new constant of the cost model has to be placed here, or shares would silently not add up."""
    model = build_hardware(
        scenario_of("qwen3-30b-a3b", gpu, weight_dtype="int4", gpu_memory_utilization=1.0)
    ).cost_model
    for name, _ in model.named_parameters():
        constant = name.rsplit(".", 1)[-1]
        assert (constant in KINDS) != (constant in RATIOS), name
    assert {kind for kind, _ in KINDS.values()} == {*RATE_KINDS, *TIME_KINDS}
    assert sorted(kind for kinds in LIMITS.values() for kind in kinds) == sorted((*RATE_KINDS, *TIME_KINDS))


@EVERY
def test_shares_add_up_to_one(name):
    _, rows = estimate(SCENARIOS[name], [1, 2, 7, 24], [1, 777, 6000])
    for row in rows:
        if row["tpot_ms"] is None:
            continue
        kinds = kinds_of(row)
        assert all(np.isfinite(value) for value in kinds.values())
        by_limit = shares(kinds)
        assert sum(by_limit.values()) == pytest.approx(1, abs=1e-9)
        assert row["bound_by"] == max(by_limit, key=by_limit.get)
        assert all(kinds[kind] <= 1e-12 for kind in RATE_KINDS) and all(kinds[kind] >= -1e-12 for kind in TIME_KINDS)


def scaled_seconds(scenario, step, kinds, factor):
    """The step with every constant of these kinds slower by a factor: rates divided, times multiplied by it."""
    model = build_hardware(scenario).cost_model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            constant = name.rsplit(".", 1)[-1]
            if constant in KINDS and KINDS[constant][0] in kinds:
                parameter += KINDS[constant][1] * np.log(factor)
        features = torch.tensor([[step.get(feature, 0) for feature in FEATURES]], dtype=torch.float64)
        return model(features).sum().item()


@EVERY
@pytest.mark.parametrize(
    "step", [decode_step(1, 300), decode_step(24, 900), prefill_step(0, 300), prefill_step(2048, 100)]
)
def test_one_percent_slower_in_everything_is_one_percent_longer(name, step):
    every = {*RATE_KINDS, *TIME_KINDS}
    before, after = (scaled_seconds(SCENARIOS[name], step, every, factor) for factor in (1.0, 1.01))
    assert after == pytest.approx(1.01 * before, rel=1e-9)


@pytest.mark.parametrize("name", ["plain", "group", "experts"])
def test_each_kind_against_a_finite_difference(name):
    _, (row,) = estimate(SCENARIOS[name], [24], [900])
    h = 1e-5
    for kind, value in kinds_of(row).items():
        slower, faster = (scaled_seconds(SCENARIOS[name], decode_step(24, 900), {kind}, 1 + s) for s in (h, -h))
        slope = (np.log(slower) - np.log(faster)) / (2 * h)
        assert (-value if kind in RATE_KINDS else value) == pytest.approx(slope, abs=1e-6), kind


@pytest.mark.parametrize(
    ("field", "elasticity"), [("bandwidth_gb_s", "memory_bandwidth"), ("link_gb_s", "link_bandwidth")]
)
def test_a_faster_gpu_moves_the_time_as_its_elasticity_says(field, elasticity, monkeypatch):
    """By a small change; doubling moves it the same way, but less far than the power law of the slope."""
    scenario = scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4, calibration="none")
    _, (before,) = estimate(scenario, [16], [2048])
    entry = hardware.gpu("h100-sxm")

    def tpot_ms(factor):
        faster = entry.model_copy(update={field: getattr(entry, field) * factor})
        monkeypatch.setitem(hardware.gpus(), "h100-sxm", faster)
        return estimate(scenario, [16], [2048])[1][0]["tpot_ms"]

    slope = before[f"elasticity_{elasticity}"]
    assert slope < -1e-3
    assert np.log(tpot_ms(1.001) / before["tpot_ms"]) == pytest.approx(slope * np.log(1.001), rel=1e-2)
    assert before["tpot_ms"] * 2**slope <= tpot_ms(2.0) < before["tpot_ms"]


# What does not fit, and mistakes


def test_the_ladder_ends_with_the_most_that_fits():
    summary, rows = estimate(PLAIN)
    most = summary["sequences_of_8192_that_fit"]
    assert summary["sequences_of_1024_that_fit"] > 256  # the engine's limit comes first
    assert [row["batch"] for row in rows if row["context"] == 1024] == [1, 8, 32, 128, 256]
    assert 32 < most < 128
    assert [row["batch"] for row in rows if row["context"] == 8192] == [1, 8, 32, most]


def test_what_does_not_fit_has_no_number():
    summary, rows = estimate(PLAIN, [1, 200], [8192])
    assert summary["sequences_of_8192_that_fit"] < 200
    asked = {"batch", "context", "prompt"}
    assert {name: value for name, value in rows[1].items() if value is not None} == {
        "batch": 200, "context": 8192, "prompt": 8192,
    }  # fmt: skip
    assert all(rows[0][name] is not None for name in rows[0]) and asked < set(rows[0])
    assert list(rows[0]) == list(rows[1])
    # A context longer than the whole pool: not one sequence of it fits, nor such a prompt.
    tight = scenario_of("llama-3.1-8b", "rtx-4090")
    pool = estimate(tight)[0]["kv_pool_tokens"]
    _, (row,) = estimate(tight, (), [pool + 1])
    assert (row["batch"], row["tpot_ms"], row["ttft_ms"]) == (1, None, None)
    _, (row,) = estimate(tight, [1], [1024], prompt=pool)
    assert row["tpot_ms"] is not None and row["ttft_ms"] is None


def test_the_longest_context_leaves_its_prompt_room_for_a_token():
    _, (row,) = estimate(PLAIN, [1], [131072])
    assert (row["context"], row["prompt"]) == (131072, 131071)


@pytest.mark.parametrize(
    ("model", "gpu", "options", "asked", "error", "message"),
    [
        ("llama-9", "h100-sxm", {}, {}, CatalogError, "unknown model 'llama-9'; known: .*llama-3.1-8b"),
        ("llama-3.1-8b", "h100", {}, {}, CatalogError, "unknown GPU 'h100'; known: .*h100-sxm"),
        ("llama-3.1-8b", "h100-sxm", {"calibration": "mine"}, {}, CatalogError, "unknown calibration 'mine'; known: auto"),
        ("llama-3.1-8b", "h100-sxm", {"calibration": "./none.json"}, {}, CatalogError, "none.json: can't be read"),
        ("llama-3.1-8b", "h100-sxm", {"tensor_parallel": 3}, {}, CatalogError, "can't be divided"),
        ("llama-3.1-8b", "h100-sxm", {"tensor_parallel": 16}, {}, CatalogError, "use at most 8"),
        ("llama-3.1-8b", "a100-80g", {"weight_dtype": "fp8"}, {}, CatalogError, "no fp8"),
        ("llama-3.1-8b", "h100-sxm", {"weight_dtype": "fp4"}, {}, StudyError, "model.weight_dtype: .*'int4'"),
        ("llama-3.1-8b", "h100-sxm", {"max_batched_tokens": 16}, {}, StudyError, "engine: .*less than max_sequences 256"),
        ("llama-3.1-8b", "h100-sxm", {"gpu_memory_utilization": 1.5}, {}, StudyError, "engine.gpu_memory_utilization"),
        ("llama-3.1-70b", "h100-sxm", {}, {}, CapacityError, "does not fit 1 x h100-sxm.*; raise tensor_parallel"),
        ("llama-3.1-8b", "h100-sxm", {}, {"contexts": [131073]}, StudyError, "^context: 131073 .*; use at most 131072"),
        ("llama-3.1-8b", "h100-sxm", {}, {"prompt": 131072}, StudyError, "^prompt: 131072 .*; use at most 131071"),
        ("llama-3.1-8b", "h100-sxm", {}, {"batches": [257]}, StudyError, "^batch: 257 .*; raise max_sequences"),
        ("llama-3.1-8b", "h100-sxm", {}, {"batches": [0]}, StudyError, "^batch: 0 is less than 1"),
        ("llama-3.1-8b", "h100-sxm", {}, {"contexts": [0]}, StudyError, "^context: 0 is less than 1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(model, gpu, options, asked, error, message):
    with pytest.raises(error) as caught:
        estimate(scenario_of(model, gpu, **options), **asked)
    line = caught.value.line()
    assert re.search(message, line), line
    assert "\n" not in line and isinstance(caught.value, PreplayError)


# The command


def test_the_command_prints_a_summary_and_a_table():
    out, err = preplay("estimate llama-3.1-8b h100-sxm --batch 1 --batch 200 --context 8192 -q")
    summary, table = out.split("\n\n")
    assert err == ""
    assert re.search(r"^sequences_of_8192_that_fit +\d+$", summary, re.MULTILINE)
    assert re.search(r"^rests_on +h100-sxm calibrated from", summary, re.MULTILINE)
    head, _, first, second = table.splitlines()
    assert "tpot_ms" in head and "elasticity" not in head and "fleet" not in head
    assert max(len(line) for line in table.splitlines()) <= 200
    assert "does not fit" not in first and second.split("does not fit")[0].split() == ["200", "8,192", "8,192"]
    assert not re.search(r"\d", second.split("does not fit", 1)[1])
    assert "fleet_tokens_s" in preplay("estimate llama-3.1-8b h100-sxm --replicas 2")[0]


def test_json_and_csv_are_the_rows():
    arguments = "estimate llama-3.1-70b h100-sxm -t 4 --weight-dtype fp8 --batch 8 --batch 256 --context 32768"
    out, err = preplay(f"{arguments} -f json")
    fits, fits_not = json.loads(out)
    assert "h100-sxm" in err
    assert set(ELASTICITIES) < set(fits) == set(fits_not)
    assert fits["tpot_ms"] > 0 and fits_not["tpot_ms"] is None and fits_not["bound_by"] is None
    first, second = csv.DictReader(io.StringIO(preplay(f"{arguments} -f csv")[0]))
    assert float(first["tpot_ms"]) == fits["tpot_ms"] and second["tpot_ms"] == "" and second["elasticity_host"] == ""
    (summary,) = json.loads(preplay(f"{arguments} -f json --summary")[0])
    assert summary["tensor_parallel"] == 4 and summary["sequences_of_32768_that_fit"] < 256


def test_a_config_json_is_named_by_its_path():
    out, err = preplay(f"estimate {DATA / 'hf/gemma-2-9b.json'} h100-sxm --batch 4 -f json")
    assert len(json.loads(out)) == 2 and err


def test_the_pages_example_runs_and_its_columns_are_the_commands():
    page = (ROOT / "docs/estimate.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = [line for line in block.splitlines() if line.startswith("preplay ")]
    assert commands
    for command in commands:
        preplay(command.removeprefix("preplay "))
    summary, rows = estimate(PLAIN)
    documented = set(re.findall(r"`([a-z_A-Z]+)`", page))
    named = {re.sub(r"\d+", "N", name) for name in summary} | set(rows[0])
    assert named - documented == set()
