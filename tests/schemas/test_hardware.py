"""The catalogue against what publishers state, and arithmetic by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from schemas import hardware
from schemas.errors import CatalogError


@pytest.mark.parametrize("name", sorted(hardware.models()))
def test_shapes_add_up_to_the_published_parameters(name):
    model = hardware.model(name)
    assert model.params / 1e9 == pytest.approx(model.published_params, rel=0.005)


def test_kv_bytes_by_hand():
    """Llama 3.1 70B: 2 (K and V) x 80 layers x 8 heads x 128 x 2 bytes = 320 KiB, the Mooncake paper's figure for LLaMA3-70B."""
    assert hardware.model("llama-3.1-70b").kv_bytes_per_token() == 320 * 1024
    assert hardware.model("llama-3.1-70b").kv_bytes_per_token("fp8", tensor_parallel=4) == 40 * 1024
    # More ranks than KV heads: heads are repeated, so 16 ranks hold as much each as 8.
    assert hardware.model("llama-3.1-70b").kv_bytes_per_token(tensor_parallel=16) == 40 * 1024
    # DeepSeek-V3: 61 layers x (512 + 64) x 2 bytes, the same on every rank.
    assert hardware.model("deepseek-v3").kv_bytes_per_token(tensor_parallel=8) == 61 * 576 * 2


def test_weight_bytes_by_hand():
    model = hardware.model("llama-3.1-8b")
    embeddings = 2 * 128256 * 4096
    assert model.weight_bytes("bf16") == model.params * 2
    assert model.weight_bytes("fp8") == (model.params - embeddings) + embeddings * 2
    assert model.weight_bytes("bf16", 4) == model.params * 2 / 4


def test_unknown_names_list_the_known_ones():
    with pytest.raises(CatalogError, match=r"unknown GPU 'h100'; known: a100-80g, b200, h100-sxm, h200, l40s, mi300x"):
        hardware.gpu("h100")
    with pytest.raises(CatalogError, match=r"unknown model 'llama'; known: deepseek-v3"):
        hardware.model("llama")


def test_heads_must_divide():
    hardware.model("llama-3.1-70b").check_tensor_parallel(16)
    with pytest.raises(CatalogError, match="can't be divided"):
        hardware.model("llama-3.1-70b").check_tensor_parallel(3)


def test_every_gpu_is_dense_and_one_way():
    """The data sheets' sparse and two-way figures are twice as high; H100's published ones are 1,979 and 900."""
    h100 = hardware.gpu("h100-sxm")
    assert (h100.bf16_tflops, h100.fp8_tflops, h100.link_gb_s) == (989, 1979, 450)
    for gpu in hardware.gpus().values():
        assert gpu.fp8_tflops is None or gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=0.02)


def tiny(**changes):
    shape = {"layers": 4, "hidden": 64, "intermediate": 48, "q_heads": 8, "kv_heads": 2, "head_dim": 16, "vocab": 100}
    return hardware.Model.model_validate(
        {"name": "tiny", "title": "Tiny", "source": "this test", "max_context": 512} | shape | changes
    )


def test_a_gate_is_a_third_matrix():
    """Attention 64 x 16 x 20 x 4 layers, MLP 3 or 2 x 64 x 48 x 4, embeddings 2 x 6,400; experts alike."""
    assert tiny().params == 4 * (64 * 16 * 20 + 3 * 64 * 48) + 2 * 6400
    assert tiny(gated_mlp=False).params == 4 * (64 * 16 * 20 + 2 * 64 * 48) + 2 * 6400
    moe = {"experts": 4, "experts_per_token": 2, "expert_intermediate": 24}
    assert tiny(moe=moe).expert_params == 3 * 64 * 24 and tiny(moe=moe, gated_mlp=False).expert_params == 2 * 64 * 24


def test_queries_of_latent_attention_may_come_straight_from_the_hidden_state():
    mla = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 16}
    kv_and_output = 64 * 36 + 32 * 8 * 24 + 8 * 16 * 64
    assert tiny(mla=mla).attention_params_per_layer == 64 * 8 * 12 + kv_and_output
    assert tiny(mla=mla | {"q_lora_rank": 16}).attention_params_per_layer == 64 * 16 + 16 * 8 * 12 + kv_and_output


def test_window_and_window_layers_go_together():
    model = tiny(window=32, window_layers=3)
    assert model.full_attention_layers == 1 and tiny().full_attention_layers == 4
    assert model.kv_elements_per_token() == tiny().kv_elements_per_token()  # an upper bound
    for wrong in ({"window": 32}, {"window_layers": 3}, {"window": 32, "window_layers": 5}):
        with pytest.raises(ValidationError, match="window"):
            tiny(**wrong)


def test_notes_are_not_part_of_the_listing():
    """`preplay catalog models` prints what a model is; notes say how a file was read."""
    assert tiny(notes=("a note",)).notes == ("a note",)
    assert "notes" not in tiny(notes=("a note",)).model_dump()
