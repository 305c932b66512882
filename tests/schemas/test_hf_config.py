"""`config.json` files: published totals, shapes by hand, every refusal by name, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import hardware
from schemas.errors import CatalogError
from schemas.hardware import Mla, Moe
from schemas.hf_config import model_from_config
from schemas.hf_families import FAMILIES, UNSUPPORTED
from tests.conftest import ROOT

HF = ROOT / "tests/data/hf"
NAMES = sorted(file.stem for file in HF.glob("*.json"))
ONE_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def published(name):
    return json.loads((HF / f"{name}.json").read_text())


def read(tmp_path, config):
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return model_from_config(file)


def refused(tmp_path, config):
    """The error of a config that must be refused: one line that begins with the file."""
    with pytest.raises(CatalogError) as caught:
        read(tmp_path, config)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"{tmp_path / 'config.json'}")
    return line.removeprefix(f"{tmp_path / 'config.json'}:")


# Published totals. Sources: tests/data/hf/README.md.

TOTALS = {
    "llama-3.1-8b": 8.030261248, "llama-3.2-1b": 1.23, "qwen2.5-7b": 7.615616512, "qwen3-8b": 8.190735360,
    "mistral-7b-v0.1": 7.241732096, "gemma-2-9b": 9.241705984, "gemma-3-12b-text": 11.765788416,
    "phi-3-mini-4k": 3.821079552, "starcoder2-7b": 7.175, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.532122624,
    "qwen1.5-moe-a2.7b": 14.3, "glm-4.5-air": 106, "gpt-oss-20b": 20.914757184, "deepseek-v2-lite": 15.7, "deepseek-v3": 671,
}  # fmt: skip


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_the_published_ones(name):
    assert model_from_config(HF / f"{name}.json").params / 1e9 == pytest.approx(TOTALS[name], rel=0.01)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_model_of_the_catalogue_is_the_same_from_its_file(name):
    own = {"title", "source", "published_params"}
    assert model_from_config(HF / f"{name}.json").model_dump(exclude=own) == hardware.model(name).model_dump(
        exclude=own
    )


# Shapes by hand.


def test_tied_embeddings_count_once():
    """Llama 3.2 1B: 16 x (2048 x 64 x (2 x 32 + 2 x 8) + 3 x 2048 x 8192) + 128256 x 2048."""
    model = model_from_config(HF / "llama-3.2-1b.json")
    assert model.params == 16 * (2048 * 64 * 80 + 3 * 2048 * 8192) + 128256 * 2048
    assert model.kv_bytes_per_token() == 16 * 2 * 8 * 64 * 2
    assert (model.tied_embeddings, model.gated_mlp, model.window, model.full_attention_layers) == (True, True, None, 16)


def test_heads_need_not_fill_the_hidden_size():
    """Mistral Nemo: 32 heads of 128 on 5120, not of 5120 / 32 = 160."""
    model = model_from_config(HF / "mistral-nemo-12b.json")
    assert model.head_dim == 128 and model.window is None and model.max_context == 128_000
    assert model.attention_params_per_layer == 5120 * 128 * (2 * 32 + 2 * 8)


@pytest.mark.parametrize(
    ("name", "window", "sliding", "full"),
    [
        ("mistral-7b-v0.1", 4096, 32, 0),
        ("gemma-2-9b", 4096, 21, 21),
        ("gemma-3-12b-text", 1024, 40, 8),
        ("gemma-3-270m", 512, 15, 3),
        ("gpt-oss-20b", 128, 12, 12),
        ("phi-3-mini-4k", 2047, 32, 0),
        ("starcoder2-7b", 4096, 32, 0),
        ("qwen3-8b", None, 0, 36),
        ("qwen1.5-moe-a2.7b", None, 0, 24),
    ],
)
def test_sliding_windows(name, window, sliding, full):
    model = model_from_config(HF / f"{name}.json")
    assert (model.window, model.window_layers, model.full_attention_layers) == (window, sliding, full)


def test_window_layers_still_count_in_kv():
    """Gemma 2 9B: 42 layers x 2 x 8 heads x 256, all of them: an upper bound."""
    assert model_from_config(HF / "gemma-2-9b.json").kv_elements_per_token() == 42 * 2 * 8 * 256


def test_mla_without_query_compression():
    """DeepSeek-V2-Lite: queries straight from 2048, 26 of 27 layers with 64 + 2 experts."""
    model = model_from_config(HF / "deepseek-v2-lite.json")
    assert model.mla == Mla(q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert model.attention_params_per_layer == (
        2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    )
    assert model.moe == Moe(experts=64, experts_per_token=6, expert_intermediate=1408, shared_experts=2, dense_layers=1)
    assert model.kv_bytes_per_token() == 27 * 576 * 2 and model.max_context == 163_840


def test_shared_experts_of_another_width_are_counted_in_experts():
    """Qwen1.5-MoE: one shared MLP of 5632 = 4 experts of 1408."""
    assert model_from_config(HF / "qwen1.5-moe-a2.7b.json").moe == Moe(
        experts=60, experts_per_token=4, expert_intermediate=1408, shared_experts=4
    )


def test_an_mlp_without_a_gate_has_two_matrices():
    """GPT-2 XL: 48 x (4 x 1600^2 + 2 x 1600 x 6400) + 50257 x 1600; OPT 6.7B by the same rule."""
    xl = model_from_config(HF / "gpt2-xl.json")
    assert xl.params == 48 * (4 * 1600**2 + 2 * 1600 * 6400) + 50257 * 1600
    assert (xl.gated_mlp, xl.kv_heads, xl.head_dim, xl.max_context) == (False, 25, 64, 1024)
    opt = model_from_config(HF / "opt-6.7b.json")
    assert opt.params == 32 * (4 * 4096**2 + 2 * 4096 * 16384) + 50272 * 4096
    assert any("learned positions" in note for note in opt.notes)


def test_falcons_share_keys_and_values_in_two_ways():
    """7B: 71 query heads, one KV head. 40B: the new architecture, 8 of 128."""
    small = model_from_config(HF / "falcon-7b.json")
    assert (small.q_heads, small.kv_heads, small.head_dim, small.intermediate) == (71, 1, 64, 4 * 4544)
    assert small.params == 32 * (4544 * 64 * (2 * 71 + 2) + 2 * 4544 * 18176) + 65024 * 4544
    large = model_from_config(HF / "falcon-40b.json")
    assert (large.kv_heads, large.head_dim, large.max_context) == (8, 64, 2048)
    assert "max_position_embeddings is not in the file: transformers' default, 2048" in large.notes


def test_experts_as_wide_as_the_mlp():
    model = model_from_config(HF / "minimax-m2.5.json")
    assert model.moe == Moe(experts=256, experts_per_token=8, expert_intermediate=1536)
    assert model.params == 62 * (3072 * 128 * 112 + 256 * 3 * 3072 * 1536 + 3072 * 256) + 2 * 200064 * 3072


def test_attention_bias_does_not_count():
    assert model_from_config(HF / "glm-4-9b.json").attention_params_per_layer == 4096 * 128 * (2 * 32 + 2 * 2)


# Defaults, aliases, notes.


def test_what_publishers_leave_out_is_the_classs_default_and_noted():
    """Google's Gemma 3 files hold only what differs from transformers' defaults."""
    model = model_from_config(HF / "gemma-3-12b-text.json")
    assert (model.head_dim, model.max_context, model.tied_embeddings, model.vocab) == (256, 131_072, True, 262_208)
    assert "head_dim is not in the file: transformers' default, 256" in model.notes


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        ("llama-3.1-8b", {"num_key_value_heads": None}, {"kv_heads": 32}),
        ("llama-3.1-8b", {"head_dim": None}, {"head_dim": 128}),
        ("llama-3.1-8b", {"tie_word_embeddings": None}, {"tied_embeddings": False}),
        ("qwen2.5-7b", {"use_sliding_window": True, "sliding_window": 8192, "max_window_layers": 20}, {"window_layers": 8}),
        ("qwen2.5-7b", {"use_sliding_window": True, "sliding_window": 8192, "max_window_layers": 28}, {"window": None}),
        ("mistral-7b-v0.1", {"sliding_window": None}, {"window": None, "window_layers": 0}),
        ("mistral-7b-v0.1", {"sliding_window": 32768}, {"window": None}),  # as long as the longest sequence
        ("gemma-2-9b", {"layer_types": ["full_attention"] * 40 + ["sliding_attention"] * 2}, {"window_layers": 2}),
        ("gemma-3-270m", {"layer_types": None, "_sliding_window_pattern": 2}, {"window_layers": 9}),
        ("gemma-3-270m", {"layer_types": None, "sliding_window_pattern": 3}, {"window_layers": 12}),
        ("gpt-oss-20b", {"layer_types": None}, {"window_layers": 12}),
        ("llama-3.1-8b", {"layer_types": ["full_attention"] * 32}, {"window": None}),
        ("deepseek-v2-lite", {"n_shared_experts": None}, {"moe": Moe(experts=64, experts_per_token=6, expert_intermediate=1408, dense_layers=1)}),
        ("deepseek-v2-lite", {"n_routed_experts": None}, {"moe": None}),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0, 1]}, {"moe_layers": 46}),
        ("minimax-m2.5", {"attn_type_list": [1] * 62}, {"layers": 62}),
        ("falcon-7b", {"multi_query": False}, {"kv_heads": 71}),
        ("gpt2-xl", {"model_type": "gpt_bigcode"}, {"kv_heads": 1}),
        ("gpt2-xl", {"n_inner": 5000}, {"intermediate": 5000}),
    ],
)  # fmt: skip
def test_variants(tmp_path, base, change, expected):
    model = read(tmp_path, published(base) | change)
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 32_768),
        ({}, 32_768),
        ({"rope_type": "default", "rope_theta": 1e6}, 32_768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "linear", "factor": 2}, 65_536),
        ({"rope_type": "dynamic", "factor": 1.5}, 49_152),
        ({"rope_type": "llama3", "factor": 8.0}, 32_768),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 32_768),
        (
            {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
            65_536,
        ),
        ({"rope_type": "new kind", "factor": 9}, 32_768),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_longest_sequence_under_rope_scaling(tmp_path, scaling, longest, key):
    config = published("qwen2.5-7b")
    del config["rope_scaling"]
    model = read(tmp_path, config | {key: scaling})
    assert model.max_context == longest
    assert any(key in note for note in model.notes) == (longest != 32_768 or "new kind" in str(scaling))


def test_notes_say_what_was_left_out():
    notes = model_from_config(HF / "deepseek-v3.json").notes
    assert notes == (
        "num_nextn_predict_layers: layers that predict further tokens are left out",
        "the published weights are bfloat16; the study's weight_dtype counts",
        "the published weights are quantized (fp8); the study's weight_dtype counts",
    )
    assert model_from_config(HF / "llama-3.1-8b.json").notes == (
        "the published weights are bfloat16; the study's weight_dtype counts",
    )


def test_unknown_fields_without_a_hint_of_architecture_are_noted(tmp_path):
    model = read(tmp_path, published("llama-3.1-8b") | {"unsloth_fixed": True, "favourite_colour": "blue", "off": None})
    assert "fields not known, taken as harmless: favourite_colour, unsloth_fixed" in model.notes


# Refusals.

REFUSALS = {
    "vision_config": {"hidden_size": 1152},
    "audio_config": {"hidden_size": 1},
    "is_encoder_decoder": True,
    "use_bidirectional_attention": True,
    "add_cross_attention": True,
    "cross_attention_layers": [3, 8],
    "mamba_d_state": 16,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "attn_type_list": [1, 0, 1],
    "attention_chunk_size": 8192,
    "num_kv_shared_layers": 10,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "activation_sparsity_pattern": [0.95],
    "index_topk": 2048,
    "compress_ratios": [4],
    "layers_block_type": ["mamba", "attention"],
    "hybrid_override_pattern": "M-M*",
    "interleave_moe_layer_step": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "swa_head_dim": 64,
    "global_head_dim": 512,
    "shared_intermediate_size": 4096,
    "draft_vocab_size": 32000,
    # Unknown, with a name that sounds like architecture.
    "num_experts": 8,
    "moe_intermediate_size": 768,
    "q_lora_rank": 512,
    "sliding_window": 4096,
    "some_new_attention_kind": "retention",
    "extra_mlp_width": 7,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_field_that_matters_is_an_error_that_names_it(tmp_path, name):
    """Where it is set. Null, false, zero and empty are off."""
    config = published("llama-3.1-8b")
    line = refused(tmp_path, config | {name: REFUSALS[name]})
    assert line.startswith(f"{name}: ") and ("not modelled" in line or "not known" in line or "drafting head" in line)
    for off in (None, False, 0, "", [], {}):
        assert read(tmp_path, config | {name: off}) == read(tmp_path, config)


@pytest.mark.parametrize(
    ("base", "change", "line"),
    [
        ("llama-3.1-8b", {"intermediate_size": [14336, 8192]}, "intermediate_size: differs by layer ([14336, 8192]), which is not modelled"),
        ("llama-3.1-8b", {"num_key_value_heads": [8, 4]}, "num_key_value_heads: differs by layer"),
        ("llama-3.1-8b", {"hidden_size": 4096.0}, "hidden_size: is 4096.0, not a whole number from 1 to 1,000,000,000"),
        ("llama-3.1-8b", {"hidden_size": "4096"}, "hidden_size: is 4096, not a whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": True}, "num_hidden_layers: is True, not a whole number"),
        ("llama-3.1-8b", {"num_hidden_layers": 0}, "num_hidden_layers: is 0, not a whole number"),
        ("llama-3.1-8b", {"num_attention_heads": 31, "num_key_value_heads": None}, "head_dim: is missing, and 4096 hidden can't be divided among 31 heads"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "num_key_value_heads: 32 query heads can't be divided among 5 KV heads"),
        ("llama-3.1-8b", {"tie_word_embeddings": "no"}, "tie_word_embeddings: is no, neither true nor false"),
        ("llama-3.1-8b", {"layer_types": ["full_attention"]}, "layer_types: is ['full_attention'], not a list of one entry for each of 32 layers"),
        ("llama-3.1-8b", {"layer_types": ["sliding_attention"] * 32}, "layer_types: sliding_attention is not known for model_type llama"),
        ("llama-3.1-8b", {"layer_types": ["linear_attention"] * 32}, "layer_types: linear_attention layers are not modelled"),
        ("llama-3.1-8b", {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: LlamaForCausalLMEagle3 is not a model that generates text"),
        ("llama-3.1-8b", {"architectures": "LlamaForCausalLM"}, "architectures: is LlamaForCausalLM, not a list of names"),
        ("gemma-2-9b", {"sliding_window": None, "layer_types": ["sliding_attention"] * 42}, "sliding_window: is missing or null, and layer_types has sliding_attention"),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window: a sliding window is not modelled"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step: is 2: experts in some layers only are not modelled"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3, 7]}, "mlp_only_layers: is [3, 7]: only leading layers without experts are modelled"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok: is 129, more than num_experts, 128"),
        ("qwen1.5-moe-a2.7b", {"shared_expert_intermediate_size": 5000}, "shared_expert_intermediate_size: is not a multiple of moe_intermediate_size, 1408"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: is 2: experts in some layers only are not modelled"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1]}, "moe_layer_freq: is [0, 1]: experts in some layers only"),
        ("opt-6.7b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim: embeddings narrower than hidden_size are not modelled"),
        ("qwen2.5-7b", {"rope_scaling": "yarn"}, "rope_scaling: is yarn, not an object"),
        ("qwen2.5-7b", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.original_max_position_embeddings: 'original_max_position_embeddings' is missing"),
        ("qwen2.5-7b", {"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor: is 4, not a positive number"),
        ("gemma-3-12b-text", {"vision_config": {"hidden_size": 1152}}, "vision_config: a vision tower is not modelled; to replay text only, put text_config into a file of its own"),
        ("gemma-3-12b-text", {"text_config": None}, "text_config: 'text_config' is missing"),
        ("gemma-3-12b-text", {"text_config": {"model_type": "llama"}}, "text_config.num_hidden_layers: 'num_hidden_layers' is missing"),
    ],
)  # fmt: skip
def test_refusals_by_hand(tmp_path, base, change, line):
    assert refused(tmp_path, published(base) | change).startswith(line)


def test_unknown_model_types_name_the_type_and_the_reason(tmp_path):
    line = refused(tmp_path, {"model_type": "perceptron9000"})
    assert line.startswith("model_type: model_type perceptron9000 can't be represented; known: bloom, cohere")
    assert refused(tmp_path, {}).startswith("model_type: 'model_type' is missing; known: bloom")
    assert refused(tmp_path, {"model_type": ["llama"]}).startswith(
        "model_type: model_type ['llama'] can't be represented"
    )
    for why, types in UNSUPPORTED.items():
        for model_type in types.split():
            assert model_type not in FAMILIES
            assert refused(tmp_path, {"model_type": model_type}).endswith(f"{model_type} can't be represented: {why}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"model_type": "llama",}', "not valid JSON: "),
        ("[1, 2]", "is [1, 2], not an object with a model's fields"),
        ('"llama"', "is llama, not an object"),
        ("null", "is None, not an object"),
        ("[" * 100_000, "can't be read ("),
        ('{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}", "can't be read (Exceeds the limit"),
    ],
    ids=["empty", "comma", "list", "string", "null", "deep", "digits"],
)
def test_broken_files(tmp_path, text, problem):
    assert problem in refused(tmp_path, text)


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(CatalogError, match=r"nowhere/config\.json: no such file; give the path of a config\.json"):
        model_from_config(tmp_path / "nowhere/config.json")
    with pytest.raises(CatalogError, match=r"config\.json: no such file"):
        model_from_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(CatalogError, match="can't be read"):
        model_from_config(tmp_path)
    for strange in ("nul\0byte.json", "x" * 5000 + ".json", "config.json/config.json"):
        with pytest.raises(CatalogError) as caught:
            model_from_config(tmp_path / strange)
        assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_fine(tmp_path):
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(published("llama-3.1-8b")))
    assert model_from_config(tmp_path).layers == 32


# Properties.

REQUIRED = {
    "llama-3.1-8b": ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings"],
    "qwen3-8b": ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"],
    "gemma-3-270m": ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size"],
    "mixtral-8x7b": ["num_hidden_layers", "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "intermediate_size", "vocab_size"],
    "qwen1.5-moe-a2.7b": ["num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"],
    "deepseek-v3": ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "vocab_size", "intermediate_size"],
    "gpt2-xl": ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size"],
    "opt-6.7b": ["ffn_dim", "hidden_size", "num_attention_heads"],
    "falcon-7b": ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"],
}  # fmt: skip


@ONE_FILE
@given(data=st.data(), name=st.sampled_from(sorted(REQUIRED)))
def test_any_required_field_missing_is_one_line_that_names_one_of_them(tmp_path, data, name):
    gone = data.draw(st.sets(st.sampled_from(REQUIRED[name]), min_size=1))
    line = refused(tmp_path, {key: value for key, value in published(name).items() if key not in gone})
    assert "is missing" in line and line.split(":")[0] in gone


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "yarn"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("factor"), inner, max_size=3)
    ),
    max_leaves=6,
)


@ONE_FILE
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_any_value_gives_a_model_or_one_line(tmp_path, data, name):
    """A field of the file or of any other family, with any JSON value: a sound model, or a line that names the file."""
    config = published(name)
    fields = sorted(
        {*config, *REFUSALS, *(key for each in REQUIRED.values() for key in each), "rope_scaling", "layer_types"}
    )
    for key in data.draw(st.sets(st.sampled_from(fields), min_size=1, max_size=3)):
        config[key] = data.draw(JSON)
    try:
        model = read(tmp_path, config)
    except CatalogError as problem:
        assert "\n" not in str(problem) and str(problem).startswith(f"{tmp_path / 'config.json'}:")
    else:
        assert model.params > 0 and model.kv_bytes_per_token() > 0 and 0 <= model.full_attention_layers <= model.layers
        assert all("\n" not in note for note in model.notes)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_known_type_reads_a_plain_file_and_needs_each_of_its_fields(tmp_path, model_type):
    family = FAMILIES[model_type]
    config = {
        "model_type": model_type, family.layers[0]: 4, family.hidden[0]: 64, family.heads[0]: 8, family.context[0]: 512,
        "vocab_size": 100, "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": True, "sliding_window": 32,
        family.intermediate[0]: 48,
    }  # fmt: skip
    if family.kv in ("mha", "falcon", "bigcode"):
        del config["num_key_value_heads"]
    if family.window == "none":
        del config["sliding_window"]
    if family.moe != "none":
        config |= {"num_experts_per_tok": 2}
        config |= {"local": {"num_local_experts": 4}, "deepseek": {"n_routed_experts": 4}}.get(
            family.moe, {"num_experts": 4}
        )
    if family.moe in ("qwen2", "qwen3", "deepseek"):
        config |= {"moe_intermediate_size": 24}
    if family.moe == "qwen2":
        config |= {"shared_expert_intermediate_size": 48}
    if family.moe == "deepseek":
        config |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
    if family.mla:
        config |= dict(zip(Mla.model_fields, (16, 32, 8, 4, 16), strict=True))
    model = read(tmp_path, config)
    assert (model.layers, model.hidden, model.q_heads, model.intermediate, model.head_dim) == (4, 64, 8, 48, 16)
    assert (model.moe is None, model.mla is None) == (family.moe == "none", not family.mla)
    assert model.gated_mlp == family.gated and model.tied_embeddings
    optional = {"tie_word_embeddings", "sliding_window", *family.defaults}
    if family.wide:
        optional.add(family.intermediate[0])
    if family.kv == "heads" or family.mla:
        optional.add("num_key_value_heads")
    if family.head_dim == "divided":
        optional.add("head_dim")
    for gone in config:
        rest = {key: value for key, value in config.items() if key != gone}
        if gone in optional:
            read(tmp_path, rest)
        else:
            assert refused(tmp_path, rest).startswith(f"{gone}: '{gone}' is missing")


# A study's model.name.


def test_a_name_can_be_a_path(tmp_path, monkeypatch):
    folder = tmp_path / "models/Tiny-1B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((HF / "llama-3.2-1b.json").read_text())
    (tmp_path / "models/tiny.json").write_text((HF / "llama-3.2-1b.json").read_text())
    by_folder = hardware.model("models/Tiny-1B", tmp_path)
    assert (by_folder.name, by_folder.title, by_folder.layers) == ("Tiny-1B", "Tiny-1B", 16)
    assert by_folder.source == "config.json (model_type llama)"  # no path: the same file, the same bytes of output
    assert hardware.model("models/Tiny-1B/config.json", tmp_path) == by_folder
    assert hardware.model("models/tiny.json", tmp_path).name == "tiny"
    assert hardware.model(str(folder), Path("/")) == by_folder
    monkeypatch.chdir(tmp_path / "models")
    assert hardware.model("tiny.json").name == "tiny"
    assert hardware.model("Tiny-1B") == by_folder  # a folder that is there, without a separator
    assert hardware.model("Tiny-1B", Path()) == by_folder


def test_a_file_is_read_once(tmp_path):
    file = tmp_path / "once.json"
    file.write_text((HF / "qwen3-8b.json").read_text())
    first = hardware.model("once.json", tmp_path)
    file.write_text("broken")
    assert hardware.model("./once.json", tmp_path) is first
    with pytest.raises(CatalogError):
        model_from_config(file)


def test_the_catalogue_comes_first(tmp_path):
    (tmp_path / "llama-3.1-8b").mkdir()
    assert hardware.model("llama-3.1-8b", tmp_path) is hardware.models()["llama-3.1-8b"]


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(CatalogError, match=r"meta-llama/Llama-3\.1-8B: no such file; .*nothing is downloaded"):
        hardware.model("meta-llama/Llama-3.1-8B", tmp_path)
    with pytest.raises(
        CatalogError, match=r"unknown model 'llama'; known: deepseek-v3, .*; or the path of a config\.json"
    ):
        hardware.model("llama", tmp_path)
    with pytest.raises(CatalogError, match="unknown model ''"):
        hardware.model("", tmp_path)
    for strange in ("a\0b", "x" * 5000, "\n"):
        with pytest.raises(CatalogError):
            hardware.model(strange, tmp_path)


def test_the_hub_caches_snapshots_are_named_after_the_model(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((HF / "qwen3-8b.json").read_text())
    assert model_from_config(folder).name == "Qwen3-8B"
