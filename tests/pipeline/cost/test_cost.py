"""The cost model: by hand, by physics, and lowered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cost.build import build_hardware
from pipeline.cost.lowered import step_components
from pipeline.cost.model import FEATURES
from schemas import hardware
from schemas.errors import CapacityError, CatalogError
from schemas.hardware import GIB
from schemas.outcome import COMPONENTS
from schemas.study import Scenario

EAGLE = {"method": "eagle", "k": 3, "conditional_acceptance": [0.8] * 3, "acceptance_source": "test"}
DRAFT = {
    "method": "draft_model",
    "k": 2,
    "conditional_acceptance": [0.8] * 2,
    "acceptance_source": "test",
    "model": "llama-3.1-8b",
}


def scenario(gpu="h100-sxm", model="llama-3.1-70b", tp=4, **more):
    return Scenario.model_validate(
        {"fleet": {"gpu": gpu, "replicas": 1, "tensor_parallel": tp}, "model": {"name": model}, **more}
    )


SCENARIOS = {
    "dense": scenario(),
    "eagle": scenario(speculation=EAGLE),
    "draft model": scenario(speculation=DRAFT),
    "moe": scenario(model="qwen3-30b-a3b", tp=1),
    "mla": scenario(
        gpu="h200",
        model="deepseek-v3",
        tp=8,
    ),
    "fp8": scenario(model="llama-3.1-70b", tp=2),
    "pcie": scenario(gpu="l40s", model="llama-3.1-8b", tp=1),
}
SCENARIOS["fp8"] = SCENARIOS["fp8"].model_copy(
    update={"model": SCENARIOS["fp8"].model.model_copy(update={"weight_dtype": "fp8"})}
)
SCENARIOS["mla"] = SCENARIOS["mla"].model_copy(
    update={"model": SCENARIOS["mla"].model.model_copy(update={"weight_dtype": "fp8"})}
)
BUILT = {name: build_hardware(each) for name, each in SCENARIOS.items()}


def seconds(name, **features):
    """Seconds by component of one step."""
    row = torch.tensor([[float(features.get(each, 0)) for each in FEATURES]], dtype=torch.float64)
    return dict(zip(COMPONENTS, BUILT[name].cost_model(row)[0].tolist(), strict=True))


def decode(name, batch, context):
    passes = SCENARIOS[name].speculation.k if name in ("eagle", "draft model") else 0
    return seconds(
        name, tokens=batch, rows=batch, sampled=batch, decode_pairs=batch * context, decode_context=batch * context,
        draft_passes=passes,
    )  # fmt: skip


def test_a_decode_step_by_hand():
    """Llama 3.1 70B on 4 H100, batch 1: every rank reads its share of the layers once.

    Per layer 8192 x (64 + 16) x 128 + 8192 x 64 x 128 + 3 x 8192 x 28672 = 855,638,016 weights; 80 layers at 2 bytes over 4
    ranks are 34.2255 GB, at 0.8 x 3.35e12 B/s 12.7707 ms. Activations, pointwise traffic add about 15 us; 720 kernels 0.72 ms.
    """
    weights = 80 * 855_638_016 * 2 / 4 / (0.8 * 3.35e12)
    assert weights == pytest.approx(12.7707e-3, rel=1e-4)
    step = decode("dense", 1, 1)
    assert weights + 720e-6 < step["gemm"] < weights + 720e-6 + 40e-6
    # 160 all-reduces of one token: latency 5 us each, 2 * 3/4 * 16 KiB over 0.68 * 450 GB/s is 0.08 us.
    assert step["communication"] == pytest.approx(160 * (5e-6 + 1.5 * 16384 / (0.68 * 450e9)), rel=1e-9)
    assert step["overhead"] == pytest.approx(515e-6)
    assert step["draft"] == 0


def test_a_long_prefill_is_bound_by_arithmetic():
    """8,192 tokens: 2 FLOPs per weight and token at 0.75 of 989 TFLOP/s on each of 4 ranks."""
    flops = 2 * 80 * 855_638_016 / 4 * 8192
    step = seconds("dense", tokens=8192, rows=1, sampled=1, prefill_pairs=8192 * 8193 / 2, prefill_context=8192)
    # Between the matrices, per token and layer: 8 x 8192 (norms), 2 x 64 x 128 / 4 (rotary), 3 x 28672 / 4 (activation), 2 bytes.
    pointwise = 80 * 8192 * 2 * (8 * 8192 + 2 * 64 * 128 / 4 + 3 * 28672 / 4) / (0.8 * 3.35e12)
    assert step["gemm"] == pytest.approx(flops / (0.75 * 989e12) + pointwise + 720e-6, rel=1e-9)
    # Attention: 4 x 16 heads x 128 FLOPs per pair and layer at 0.52 of the peak.
    assert step["attention_prefill"] == pytest.approx(80 * 4 * 16 * 128 * 8192 * 8193 / 2 / (0.52 * 989e12), rel=1e-9)


def test_decode_attention_reads_kv_once():
    """64 rows of 10,000 tokens: 320 KiB / 4 per token and rank."""
    step = decode("dense", 64, 10_000)
    assert step["attention_decode"] == pytest.approx(64 * 10_000 * 320 * 1024 / 4 / (0.8 * 3.35e12), rel=1e-9)


def test_batch_one_decode_is_weights_over_bandwidth_and_overhead():
    """Physical sanity: within 15 % of all weights but the embedding, read once, plus what the host and launches add."""
    for name in ("dense", "pcie", "fp8"):
        model = hardware.model(SCENARIOS[name].model.name)
        shapes = BUILT[name].cost_model.shapes
        tp = SCENARIOS[name].fleet.tensor_parallel
        read = model.weight_bytes(SCENARIOS[name].model.weight_dtype, tp) - model.head_params * 2 / tp
        gpu = hardware.gpu(SCENARIOS[name].fleet.gpu)
        ideal = read / (0.8 * gpu.bandwidth_gb_s * 1e9)
        ideal += 515e-6 + shapes.kernels * 1e-6 + shapes.allreduces * 5e-6
        assert sum(decode(name, 1, 1).values()) == pytest.approx(ideal, rel=0.15)


def test_experts_are_read_as_often_as_they_are_visited():
    """Qwen3-30B-A3B, 8 of 128 experts: one token reads 8; 2,048 tokens read all, 16 times as much, not 2,048 times."""
    experts = BUILT["moe"].cost_model.shapes.experts
    model = BUILT["moe"].cost_model
    one, many = model.experts_seconds(experts, torch.tensor([1.0, 64.0], dtype=torch.float64)).tolist()
    distinct = 128 * (1 - (1 - 8 / 128) ** 64)
    assert many / one == pytest.approx(distinct / 8, rel=0.05)


def test_draft_is_costed_by_its_own_passes():
    """An EAGLE draft on 70B: LM head 128,256 x 8,192 at bf16 over 4 ranks alone is 0.525 GB, 0.196 ms; three passes."""
    step = decode("eagle", 1, 1000)
    head = 128256 * 8192 * 2 / 4 / (0.8 * 3.35e12)
    layer = 855_638_016 * 2 / 4 / (0.8 * 3.35e12)
    assert step["draft"] == pytest.approx(3 * (head + layer + 200e-6 + 9e-6 + 10e-6), rel=0.02)
    # vLLM #20780: 0.74 ms per draft token for EAGLE on Llama 3.1 8B; one H100 here.
    one = build_hardware(
        scenario(model="llama-3.1-8b", tp=1, speculation={**EAGLE, "k": 1, "conditional_acceptance": [0.8]})
    )
    row = torch.tensor([[1, 1, 2, 0, 0, 500, 500, 1]], dtype=torch.float64)
    assert one.cost_model(row)[0, COMPONENTS.index("draft")].item() == pytest.approx(0.74e-3, rel=0.1)


@st.composite
def steps(draw, k=0):
    rows = draw(st.integers(1, 256))
    decodes = draw(st.integers(0, rows))
    prefill = draw(st.integers(rows - decodes, 4000)) if decodes < rows else 0
    drafts = draw(st.integers(0, k)) * decodes
    context = draw(st.integers(1, 2_000_000))
    return {
        "tokens": prefill + decodes + drafts,
        "rows": rows,
        "sampled": rows + drafts,
        "prefill_pairs": prefill * draw(st.integers(1, 60_000)),
        "prefill_context": context if prefill else 0,
        "decode_pairs": (decodes + drafts) * draw(st.integers(1, 60_000)),
        "decode_context": context if decodes else 0,
    }


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_lowered_equals_torch(name):
    passes = SCENARIOS[name].speculation.k if name in ("eagle", "draft model") else 0

    @settings(max_examples=60, deadline=None)
    @given(steps(k=passes))
    def check(step):
        step = {**step, "draft_passes": passes}
        expected = seconds(name, **step)
        ints = ("tokens", "rows", "sampled", "draft_passes")
        lowered = step_components(
            BUILT[name].lowered, *(int(step[f]) if f in ints else float(step[f]) for f in FEATURES)
        )
        for component, value in zip(COMPONENTS, lowered, strict=True):
            assert value == pytest.approx(expected[component], rel=1e-6, abs=1e-15), component

    check()


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_time_grows_with_work_and_shrinks_with_nothing_but_hardware(name):
    passes = SCENARIOS[name].speculation.k if name in ("eagle", "draft model") else 0

    @settings(max_examples=40, deadline=None)
    @given(steps(k=passes), st.sampled_from([f for f in FEATURES if f != "draft_passes"]))
    def check(step, feature):
        less = {**step, "draft_passes": passes}
        more = {**less, feature: less[feature] + 1}
        assert sum(seconds(name, **more).values()) >= sum(seconds(name, **less).values())

    check()


def test_half_the_bandwidth_never_helps():
    full = BUILT["dense"].cost_model
    halved = type(full)(full.gpu.model_copy(update={"bandwidth_gb_s": full.gpu.bandwidth_gb_s / 2}), full.shapes)
    row = torch.tensor(
        [[64, 64, 64, 0, 0, 64_000, 64_000, 0], [4096, 1, 1, 8_000_000, 4096, 0, 0, 0]], dtype=torch.float64
    )
    assert torch.all(halved(row).sum(-1) >= full(row).sum(-1))


def test_elasticities_flow_through_the_module():
    """Autograd reaches every parameter that takes part: a decode step gets shorter with more memory efficiency."""
    model = BUILT["dense"].cost_model
    row = torch.tensor([[8, 8, 8, 0, 0, 8000, 8000, 0]], dtype=torch.float64)
    total = model(row).sum()
    (gradient,) = torch.autograd.grad(total, [model.log_parameters["memory"]])
    assert -1 < gradient.item() / total.item() < -0.7


def test_capacity_by_hand():
    """70B on 4 H100: 79.6 x 0.9 - weights - activations - reserve, divided by 320 KiB / 4 per token."""
    capacity = BUILT["dense"].capacity
    weights = hardware.model("llama-3.1-70b").params * 2 / 4 / GIB
    left = 79.6 * 0.9 - weights - capacity.activations_gib - 1.0
    assert capacity.pool_blocks == int(left * GIB // (16 * 80 * 1024))
    assert 0.5 < capacity.activations_gib < 3
    assert BUILT["eagle"].capacity.pool_blocks < capacity.pool_blocks, "a drafter's weights and KV come out of the pool"
    assert BUILT["draft model"].capacity.draft_weights_gib == pytest.approx(
        hardware.model("llama-3.1-8b").params * 2 / 4 / GIB
    )


def test_what_does_not_fit_says_the_sum():
    with pytest.raises(
        CapacityError, match=r"llama-3.1-70b \(bf16\) does not fit 1 x h100-sxm: 71.6 GiB usable per GPU, weights 131.4"
    ):
        build_hardware(scenario(tp=1))
    with pytest.raises(CatalogError, match="has no fp8"):
        build_hardware(
            Scenario.model_validate(
                {
                    "fleet": {"gpu": "a100-80g", "replicas": 1, "tensor_parallel": 4},
                    "model": {"name": "llama-3.1-70b", "weight_dtype": "fp8"},
                }
            )
        )
    with pytest.raises(CatalogError, match="8 GPUs in one link domain"):
        build_hardware(scenario(tp=16))
