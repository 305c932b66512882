"""What a scenario makes of a trace: priorities by tenant, warm-up, CUDA-graph padding, block sizes."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest
import torch

from pipeline.cost.build import build_hardware, graph_sizes, notes_of, provenance
from pipeline.cost.model import StepCostModel
from pipeline.scenario import resolve, run_scenario
from pipeline.single import summary
from schemas.calibration import HeldOut
from schemas.errors import StudyError
from schemas.study import Engine, Scenario
from tests.traces_made import made_trace

BASE = {"fleet": {"gpu": "h100-sxm", "replicas": 1}, "model": {"name": "llama-3.1-8b"}}


def outcomes_of(trace, **sections):
    resolved = resolve("x", Scenario.model_validate({**BASE, **sections}), trace, 10.0)
    return resolved, run_scenario(resolved, trace, 1)[0]


def request(arrival_s, tenant=None, **more):
    return {"arrival_s": arrival_s, "tenant": tenant, "input_tokens": 3000, "output_tokens": 20, **more}


def test_a_tenant_with_priority_overtakes(tmp_path):
    """One at a time: of four that wait together the gold one, which came last, is first; unnamed tenants are in between."""
    rows = [request(0.0, "bulk"), request(0.001, "bulk"), request(0.002, None), request(0.003, "gold")]
    trace = made_trace(tmp_path, rows)
    engine = {"max_sequences": 1, "scheduling": "priority", "priorities": {"gold": -1, "bulk": 5}}
    _, outcomes = outcomes_of(trace, engine=engine)
    queue = outcomes["queue_ms"].to_pylist()
    order = sorted(range(4), key=lambda row: queue[row] + outcomes["arrival_s"][row].as_py() * 1e3)
    assert order == [0, 3, 2, 1], "the first runs before the others are there"
    _, fcfs = outcomes_of(trace, engine={"max_sequences": 1})
    assert fcfs["queue_ms"].to_pylist() == sorted(fcfs["queue_ms"].to_pylist())


def test_priorities_of_tenants_that_are_not_there(tmp_path):
    engine = {"scheduling": "priority", "priorities": {"gold": -1}}
    with pytest.raises(StudyError, match=r"x\.engine\.priorities: the trace has no tenant 'gold'; its tenants: 'a'"):
        outcomes_of(made_trace(tmp_path / "a", [request(0.0, "a")]), engine=engine)
    with pytest.raises(StudyError, match="its tenants: none at all"):
        outcomes_of(made_trace(tmp_path / "b", [request(0.0)]), engine=engine)


def test_the_warm_up_is_replayed_and_not_measured(tmp_path):
    rows = [request(float(second), prefix_blocks=[1, 2, 3, 4, 5, 6]) for second in range(10)]
    trace = made_trace(tmp_path, rows)
    cold, everything = outcomes_of(trace, prefix_cache={"enabled": True})
    warm, measured = outcomes_of(trace, prefix_cache={"enabled": True}, workload={"warmup_s": 4.0, "rate": 2.0})
    assert everything["hit_tokens"].to_pylist() == [0] + [2560 + 432] * 9  # 5 blocks of 512, 27 of 16 in the named rest
    assert measured["warmup"].to_pylist() == [True] * 4 + [False] * 6, "seconds of the trace, not of the replay"
    assert summary(cold, 1, everything)["requests"] == 10
    short = summary(warm, 1, measured)
    assert (short["requests"], short["reuse_ratio_tokens"]) == (6, pytest.approx(2992 / 3000))
    with pytest.raises(StudyError, match=r"x\.workload\.warmup_s: the trace's last request arrives after 9 s"):
        outcomes_of(trace, workload={"warmup_s": 9.5})


def test_block_sizes_that_the_trace_cannot_tell(tmp_path):
    trace = made_trace(tmp_path, [request(0.0, prefix_blocks=[1, 2, 3, 4, 5])])
    for block_tokens in (768, 24):
        with pytest.raises(StudyError, match=r"neither divides the trace's blocks of 512 tokens nor is a multiple"):
            outcomes_of(trace, engine={"block_tokens": block_tokens}, prefix_cache={"enabled": True})
    _, outcomes = outcomes_of(trace, engine={"block_tokens": 1024}, prefix_cache={"enabled": True})
    assert pc.sum(outcomes["output_tokens"]).as_py() == 20


def test_vllms_cuda_graph_sizes():
    """vLLM 0.11 and later, max_num_seqs 256: 1, 2, 4, 8 to 248 by 8, 256 to 512 by 16, 51 sizes."""
    sizes = graph_sizes(Engine(), 0)
    assert (len(sizes), sizes[:5], sizes[-2:]) == (51, (1, 2, 4, 8, 16), (496, 512))
    assert graph_sizes(Engine(max_sequences=8), 0) == (1, 2, 4, 8, 16)
    assert graph_sizes(Engine(max_sequences=8), 2)[-1] == 48, "a decoding row has three tokens"
    assert graph_sizes(Engine(cuda_graph_sizes="none"), 0) == ()
    assert graph_sizes(Engine(cuda_graph_sizes=(64, 8)), 0) == (8, 64)


def test_padding_computes_the_next_larger_graph():
    """Body and all-reduce as for the padded count, LM head and overhead as for the real one; none beyond the largest."""
    built = build_hardware(Scenario.model_validate({**BASE, "engine": {"cuda_graph_sizes": [8, 64]}}))
    plain = build_hardware(Scenario.model_validate({**BASE, "engine": {"cuda_graph_sizes": "none"}}))
    padded, real = built.lowered, plain.lowered
    assert padded.gemm[3] == real.gemm[8] != real.gemm[3]
    assert padded.gemm[8] == real.gemm[8]
    assert padded.gemm[9] == real.gemm[64]
    assert padded.gemm[65] == real.gemm[65]
    assert (padded.sampling == real.sampling).all()
    assert isinstance(built.cost_model, StepCostModel)
    step = torch.tensor([[9.0, 9, 9, 900, 100, 0, 0, 0, 0, 0, 0, 1, 0]], dtype=torch.float64)
    assert built.cost_model(step)[0, 0].item() == pytest.approx(real.gemm[64], rel=1e-12)


@pytest.mark.parametrize(("sizes", "problem"), [([], "empty"), ([8, 100_000], "larger than any step")])
def test_cuda_graphs_that_no_step_could_use_are_refused(sizes, problem):
    with pytest.raises(ValueError, match=problem):
        Engine(cuda_graph_sizes=sizes)


def test_provenance_names_the_worst_part_in_use():
    """Experts count where the model has some, expert parallelism where it is on; attention of an H200 is off by 12.7 %."""
    scenario = {**BASE, "fleet": {"gpu": "h200", "replicas": 1}}
    experts = {"name": "qwen3-30b-a3b", "weight_dtype": "fp8"}
    moe, dense = (
        build_hardware(Scenario.model_validate({**scenario, "model": model}))
        for model in (experts, {"name": "llama-3.1-8b"})
    )
    bad = HeldOut(part="experts fp8", split="half", rows=1, median=0.2, p95=0.3)
    parallel = bad.model_copy(update={"split": "of these, expert parallel", "median": 0.5})
    for built in (moe, dense):
        kept = built.cost_model.calibration
        built.cost_model.calibration = kept.model_copy(update={"held_out": (*kept.held_out, bad, parallel)})
    assert "20.0%, of experts fp8" in provenance([moe])
    assert "12.7%, of attention" in provenance([dense])


def test_notes_are_of_parts_in_use():
    """Which fp8 the experts were timed at is for who serves experts at fp8."""
    scenario = {**BASE, "fleet": {"gpu": "h200", "replicas": 1}}
    fp8, bf16 = (
        build_hardware(Scenario.model_validate({**scenario, "model": {"name": "qwen3-30b-a3b", "weight_dtype": dtype}}))
        for dtype in ("fp8", "bf16")
    )
    assert notes_of([fp8, fp8])[0].startswith("h200, experts fp8: weights scaled in blocks of 128 x 128")
    assert "one scale per matrix (ModelOpt) the database's kernels take 4.3 times as long" in notes_of([fp8])[0]
    assert len(notes_of([fp8])) == 2 and [note[:18] for note in notes_of([bf16])] == ["h200, experts bf16"]
