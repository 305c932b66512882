"""Expert and pipeline parallelism: by hand, by physics, and what the replay refuses."""

from __future__ import annotations

import pytest
import torch

from pipeline.cost.build import build_hardware
from pipeline.cost.lowered import step_components
from pipeline.cost.model import FEATURES
from pipeline.cost.stages import round_seconds, stage_layers, stage_seconds, stages_of
from pipeline.estimate import decode_step, estimate, features_of, prefill_step, scenario_of
from pipeline.scenario import resolve
from schemas import hardware
from schemas.errors import CapacityError, CatalogError, StudyError
from schemas.hardware import GIB
from schemas.outcome import COMPONENTS
from schemas.study import Scenario
from tests.conftest import DATA

STEPS = [
    decode_step(1, 300),
    decode_step(24, 900),
    decode_step(200, 2000),
    prefill_step(0, 300),
    prefill_step(2048, 1000),
]
DEEPSEEK = {"gpu": "h200", "tensor_parallel": 8, "weight_dtype": "fp8"}


def built(model, gpu, **options):
    return build_hardware(scenario_of(model, gpu, **options))


def seconds(found, steps=STEPS):
    """[steps, components]"""
    with torch.no_grad():
        return found.cost_model(features_of(steps))


# Expert parallelism


def test_experts_are_whole_on_one_rank_each():
    """DeepSeek-V3 on 8: 32 experts of 3 x 7,168 x 2,048 weights each, instead of 256 of an eighth: as many bytes."""
    whole, sliced = built("deepseek-v3", expert_parallel=True, **DEEPSEEK), built("deepseek-v3", **DEEPSEEK)
    mine, theirs = whole.cost_model.shapes.experts, sliced.cost_model.shapes.experts
    assert (mine.ranks, mine.params, mine.width) == (8, 3 * 7168 * 2048, 2048)
    assert (theirs.ranks, theirs.params, theirs.width) == (1, 3 * 7168 * 256, 256)
    assert whole.capacity == sliced.capacity


def test_vllm_has_no_all_to_all_without_data_parallelism():
    """The same all-reduces, the same attention; only the experts' own time differs."""
    whole, sliced = (seconds(built("deepseek-v3", expert_parallel=each, **DEEPSEEK)) for each in (True, False))
    for place, name in enumerate(COMPONENTS):
        if name != "gemm":
            assert torch.equal(whole[:, place], sliced[:, place]), name


def test_the_busiest_rank_costs_most_at_small_batches():
    """19 % more weights read at 32 tokens of 8 in 256 (docs/parallelism.md), hardly any at 500; the constants are the same."""
    law = built("deepseek-v3", expert_parallel=True, **DEEPSEEK).cost_model.experts
    whole, sliced = (
        built("deepseek-v3", expert_parallel=each, **DEEPSEEK).cost_model.shapes.experts for each in (True, False)
    )
    tokens = torch.tensor([32.0, 500.0], dtype=torch.float64)
    launch = law.parameter("launch_us").item() * 1e-6
    ratio = ((law.seconds(whole, tokens) - launch) / (law.seconds(sliced, tokens) - launch)).tolist()
    assert ratio[0] == pytest.approx(1.19, abs=0.05)
    assert 1.0 < ratio[1] < 1.12


def test_one_gpu_has_all_experts_either_way():
    whole, sliced = (seconds(built("qwen3-30b-a3b", "h200", expert_parallel=each)) for each in (True, False))
    assert torch.equal(whole, sliced)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_expert_parallel_is_never_below_the_roofline(batch):
    """Distinct experts of one rank over the data sheet's bandwidth."""
    found = built("deepseek-v3", expert_parallel=True, **DEEPSEEK)
    experts = found.cost_model.shapes.experts
    distinct = 32 * (1 - (31 / 32) ** batch)
    least = experts.layers * distinct * experts.params * experts.bytes_per_weight / 4800e9
    assert seconds(found, [decode_step(batch, 1000)]).sum() > least


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "llama-3.1-8b", "gpu": "h100-sxm", "tensor_parallel": 2, "expert_parallel": True}, "has 0 experts"),
        ({"model": "deepseek-v3", "gpu": "h200", "pipeline_parallel": 62}, "has 61 layers; use at most 61"),
    ],
)
def test_what_can_not_be_divided(options, line):
    with pytest.raises(CatalogError) as caught:
        build_hardware(scenario_of(**options))
    assert line in caught.value.line()
    with pytest.raises(CatalogError, match="8 experts: they can't be divided among tensor_parallel = 16"):
        hardware.model("mixtral-8x7b").check_tensor_parallel(16, expert_parallel=True)


def test_lowered_equals_torch():
    found = built("deepseek-v3", expert_parallel=True, **DEEPSEEK)
    for step, row in zip(STEPS, seconds(found), strict=True):
        lowered = step_components(found.lowered, *(step.get(feature, 0) for feature in FEATURES))
        assert list(lowered) == pytest.approx(row.tolist(), rel=1e-6, abs=1e-15)


# Pipeline parallelism


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(61, 1, (61,)), (80, 4, (20,) * 4), (61, 4, (15, 15, 16, 15)), (7, 4, (2, 2, 2, 1)), (3, 3, (1, 1, 1))],
)
def test_layers_are_dealt_out_as_vllm_does(layers, stages, expected):
    assert stage_layers(layers, stages) == expected


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3.1-70b", "qwen3-30b-a3b", str(DATA / "hf/gemma-2-9b.json")])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_stages_make_the_model(name, stages):
    """Layers, kinds of layers, weights and KV add up; tied embeddings are held at both ends."""
    model = hardware.model(name)
    cut = stages_of(model, stages)
    assert sum(stage.model.layers for stage in cut) == model.layers
    assert sum(stage.model.window_layers for stage in cut) == model.window_layers
    assert sum(stage.model.moe_layers for stage in cut) == model.moe_layers
    assert sum(stage.model.kv_bytes_per_token("bf16", 2) for stage in cut) == model.kv_bytes_per_token("bf16", 2)
    twice = model.head_params * 2 / 2 if model.tied_embeddings and stages > 1 else 0
    assert sum(stage.weight_bytes("bf16", 2) for stage in cut) == pytest.approx(model.weight_bytes("bf16", 2) + twice)


@pytest.mark.parametrize(
    ("model", "gpu", "options"),
    [
        ("llama-3.1-70b", "a100-80g", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("llama-3.1-70b", "h100-sxm", {"tensor_parallel": 4, "pipeline_parallel": 3}),
        ("llama-3.1-8b", "rtx-4090", {"pipeline_parallel": 2}),
        (
            "deepseek-v3",
            "h200",
            {"tensor_parallel": 4, "pipeline_parallel": 4, "weight_dtype": "fp8", "expert_parallel": True},
        ),
    ],
)
def test_a_pass_is_its_stages(model, gpu, options):
    found = built(model, gpu, **options)
    features = features_of(STEPS)
    with torch.no_grad():
        busy = torch.stack([stage_seconds(found.cost_model, stage, features) for stage in found.stages])
        whole = found.cost_model(features).sum(-1)
        rounds = round_seconds(found.cost_model, found.stages, features)
    assert busy.sum(0).tolist() == pytest.approx(whole.tolist(), rel=1e-9)
    assert rounds.tolist() == pytest.approx((len(found.stages) * busy.amax(0)).tolist()), (
        "the slowest is above the mean"
    )
    assert (rounds >= whole - 1e-15).all() and (rounds < 1.6 * whole).all()


def test_sends_by_hand():
    """Llama 3.1 70B, two stages of two A100: 24 tokens x 8,192 x 2 bytes, hidden states and residual, half of each per GPU."""
    found = built("llama-3.1-70b", "a100-80g", tensor_parallel=2, pipeline_parallel=2)
    apart = built("llama-3.1-70b", "a100-80g", tensor_parallel=2, gpu_memory_utilization=1.0)
    place = COMPONENTS.index("communication")
    more = (seconds(found) - seconds(apart))[1, place].item()
    link = found.cost_model.calibration.allreduce[2]
    message = 24 * 8192 * 2
    send = link.latency_us * 1e-6 + message / 2 / (link.link_gb_s * 1e9)
    gather = link.latency_us * 1e-6 + message / 2 / (link.link_gb_s * 1e9)
    assert more == pytest.approx(2 * (send + gather), rel=1e-6)
    for other, name in enumerate(COMPONENTS):
        if other != place:
            assert seconds(found)[1, other].item() == pytest.approx(seconds(apart)[1, other].item(), rel=1e-12), name


def test_hops_leave_the_node_where_its_gpus_are_used_up():
    """8 GPUs a node: of 4 stages of 4, every second hop is over the network, which takes longer."""
    four = built("llama-3.1-70b", "h100-sxm", tensor_parallel=4, pipeline_parallel=4)
    assert [stage.hops for stage in four.stages] == [(1, 0), (0, 1), (1, 0), (0, 0)]
    assert four.cost_model.shapes.hops == (2, 1)
    near, far = (built("llama-3.1-8b", "h100-sxm", tensor_parallel=t, pipeline_parallel=2).stages for t in (4, 8))
    assert (near[0].hops, far[0].hops) == ((1, 0), (0, 1))


def test_capacity_is_the_fullest_stages():
    """70B on 2 x 2 A100: the last stage has LM head and logits, the first the embedding; 40 layers' KV, half of it per GPU."""
    found = built("llama-3.1-70b", "a100-80g", tensor_parallel=2, pipeline_parallel=2)
    model, capacity = hardware.model("llama-3.1-70b"), found.capacity
    weights = (40 * (model.attention_params_per_layer + model.mlp_params_per_layer) + model.head_params) * 2 / 2
    assert capacity.weights_gib == pytest.approx(weights / GIB)
    assert capacity.kv_bytes_per_token == 40 * 2 * 4 * 128 * 2
    logits = 256 * 128256 * 4 * 2
    assert capacity.activations_gib * GIB == pytest.approx(8192 * (4 * 8192 + 3 * 28672 / 2) * 2 + logits)
    with pytest.raises(CapacityError, match=r"does not fit 2 x rtx-4090: .*, weights"):
        build_hardware(scenario_of("llama-3.1-70b", "rtx-4090", pipeline_parallel=2))


def test_twice_the_stages_more_room_and_never_a_faster_pass():
    """A lone sequence gains nothing; a large batch's throughput grows; the pool holds more."""
    one, two = (scenario_of("llama-3.1-70b", "h200", pipeline_parallel=stages) for stages in (2, 4))
    summaries, rows = zip(*(estimate(each, [1, 256], [1024]) for each in (one, two)), strict=True)
    assert summaries[1]["kv_pool_tokens"] > 2 * summaries[0]["kv_pool_tokens"]
    assert rows[1][0]["tpot_ms"] >= 0.999 * rows[0][0]["tpot_ms"]
    assert rows[1][0]["ttft_ms"] > rows[0][0]["ttft_ms"]
    assert rows[0][1]["tokens_s"] < rows[1][1]["tokens_s"] < 2 * rows[0][1]["tokens_s"]
    assert rows[1][1]["tokens_s_per_gpu"] == pytest.approx(rows[1][1]["tokens_s"] / 4)


def test_a_fleets_gpus():
    fleet = {"gpu": "h100-sxm", "replicas": 3, "tensor_parallel": 4, "pipeline_parallel": 2}
    fleet = Scenario.model_validate({"fleet": fleet, "model": {"name": "llama-3.1-70b"}}).fleet
    assert (fleet.gpus_per_replica, fleet.gpus) == (8, 24)


def test_the_replay_refuses_stages():
    """Before it looks at the trace."""
    with pytest.raises(StudyError) as caught:
        resolve("staged", scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4, pipeline_parallel=2), None, 1.0)
    line = caught.value.line()
    assert line.startswith("staged.fleet.pipeline_parallel: pipeline_parallel = 2 is not modelled in the replay")
    assert "use 1" in line and "\n" not in line
