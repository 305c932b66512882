"""What Preplay knows of Hugging Face model types: how each names its fields, and which fields of any type matter.

Data for `schemas/hf_config.py`. Field names and defaults are those of transformers' configuration classes, versions 4.57.6
and 5.18.0; windows by layer are those of its modelling code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Family:
    """How one `model_type` names its fields, and what transformers takes where the file says nothing."""

    tied: bool = False  # tie_word_embeddings
    gated: bool = True
    layers: tuple[str, ...] = (
        "num_hidden_layers",
    )  # aliases: the first that the file has; errors name the first of all
    hidden: tuple[str, ...] = ("hidden_size",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    intermediate: tuple[str, ...] = ("intermediate_size",)
    wide: bool = False  # a missing intermediate size is 4 x hidden
    context: tuple[str, ...] = ("max_position_embeddings",)
    kv: Literal["given", "heads", "mha", "falcon", "bigcode"] = (
        "given"  # heads: a missing number is that of query heads
    )
    head_dim: Literal["divided", "given"] = "divided"  # divided: a missing one is hidden / heads
    window: Literal["none", "all", "qwen", "never"] | int = (
        "none"  # number n: every n-th layer sees all, the others slide
    )
    window_default: int | None = None
    moe: Literal["none", "local", "olmoe", "qwen2", "qwen3", "deepseek"] = "none"
    mla: bool = False
    positions: bool = False  # a learned position table
    defaults: dict[str, int] = field(default_factory=dict)  # what publishers leave out of the file


_GPT2 = Family(
    tied=True, gated=False, kv="mha", layers=("n_layer", "num_hidden_layers"), hidden=("n_embd", "hidden_size"),
    heads=("n_head", "num_attention_heads"), context=("n_positions", "max_position_embeddings"), intermediate=("n_inner",),
    wide=True, positions=True,
)  # fmt: skip
_BLOOM = Family(
    tied=True, gated=False, kv="mha", layers=("n_layer", "num_hidden_layers"), hidden=("hidden_size", "n_embed"),
    heads=("n_head", "num_attention_heads"), intermediate=("n_inner",), wide=True, context=("seq_length",),
    defaults={"seq_length": 2048},
)  # fmt: skip
_FALCON = Family(
    tied=True, gated=False, kv="falcon", layers=("num_hidden_layers", "n_layer"), heads=("num_attention_heads", "n_head"),
    intermediate=("ffn_hidden_size",), wide=True, defaults={"max_position_embeddings": 2048},
)  # fmt: skip
_GEMMA3 = {
    "head_dim": 256, "max_position_embeddings": 131_072, "vocab_size": 262_208, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_MLA = Family(mla=True, moe="deepseek")

FAMILIES: dict[str, Family] = {
    # Dense, gated.
    "llama": Family(kv="heads"),
    "mistral": Family(window="all", window_default=4096),
    "qwen2": Family(window="qwen"),
    "qwen3": Family(window="qwen", head_dim="given"),
    "phi3": Family(kv="heads", window="all"),
    "gemma": Family(tied=True, head_dim="given"),
    "gemma2": Family(tied=True, head_dim="given", window=2, window_default=4096),
    "gemma3_text": Family(tied=True, head_dim="given", window=6, window_default=4096, defaults=_GEMMA3),
    "glm": Family(head_dim="given"),
    "glm4": Family(head_dim="given"),
    "olmo": Family(kv="heads"),
    "olmo2": Family(kv="heads"),
    "olmo3": Family(kv="heads", window=4, window_default=4096),
    "granite": Family(kv="heads"),
    "cohere": Family(tied=True, kv="heads", context=("model_max_length", "max_position_embeddings")),
    "cohere2": Family(tied=True, kv="heads", window=4, window_default=4096),
    "stablelm": Family(),
    "smollm3": Family(tied=True, window="never"),
    "seed_oss": Family(head_dim="given"),
    "ernie4_5": Family(tied=True, head_dim="given"),
    # Dense, two matrices.
    "starcoder2": Family(tied=True, gated=False, window="all"),
    "nemotron": Family(gated=False, kv="heads"),
    "phi": Family(gated=False, kv="heads"),
    "gpt_neox": Family(gated=False, kv="mha"),
    "opt": Family(tied=True, gated=False, kv="mha", intermediate=("ffn_dim",), positions=True),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, kv="bigcode"),
    "bloom": _BLOOM,
    "falcon": _FALCON,
    # Mixtures of experts.
    "mixtral": Family(window="all", moe="local"),
    "phimoe": Family(window="all", moe="local"),
    "granitemoe": Family(kv="heads", moe="local"),
    "gpt_oss": Family(head_dim="given", window=2, window_default=128, moe="local"),
    "minimax_m2": Family(head_dim="given", moe="local"),
    "olmoe": Family(kv="heads", moe="olmoe"),
    "qwen2_moe": Family(window="qwen", moe="qwen2"),
    "qwen3_moe": Family(window="never", moe="qwen3"),
    "glm4_moe": Family(moe="deepseek"),
    # Multi-head latent attention, with experts.
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
}

WRAPPERS = {"gemma3": "gemma3_text"}
"""Types that hold their language model in `text_config`, and its type where that says none."""

UNSUPPORTED = {
    "linear-attention layers": "qwen3_next qwen3_5 qwen3_5_moe minimax minimax_text_01 kimi_linear",
    "state-space or convolution layers": "mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba zamba2 nemotron_h "
    "granitemoehybrid lfm2 rwkv recurrent_gemma plamo2",
    "sparse attention by an indexer": "deepseek_v32 deepseek_v4 glm_moe_dsa minimax_m3",
    "chunked attention": "llama4 llama4_text",
    "per-layer inputs and layers that share KV": "gemma3n gemma3n_text",
    "heads that differ by layer": "gemma4 gemma4_text mimo_v2_flash step3p7 nemotron-nas",
    "cross attention": "mllama mllama_text_model",
    "an encoder": "t5 mt5 umt5 bart mbart whisper bert roberta modernbert t5gemma",
    "a vision tower; to replay text only, put text_config into a file of its own": "llava llava_next mistral3 kimi_k25 "
    "paligemma idefics3 smolvlm internvl",
    "a vision tower": "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe phi4mm minimax_m3_vl",
}
"""What stands in the way of types that people ask for. Any other unknown type is refused without a reason."""

REFUSED = (
    (r"vision.*|.*_vision|visual", "a vision tower is not modelled"),
    (r"audio_.*|speech_.*|video_.*", "an audio or video tower is not modelled"),
    (r"is_encoder_decoder|encoder_.*|num_encoder_layers|use_bidirectional_attention", "encoders are not modelled"),
    (r".*cross_attention.*", "cross attention is not modelled"),
    (r".*mamba.*|.*ssm.*|state_size|conv_.*|time_step_.*|.*rwkv.*|lru_width", "state-space layers are not modelled"),
    (r"linear_.*|full_attention_interval|attn_type_list|.*lightning.*", "linear-attention layers are not modelled"),
    (r"attention_chunk_size|chunked_.*", "chunked attention is not modelled"),
    (r"num_kv_shared_layers|.*kv_shar.*|cla_.*|use_cla", "layers that share KV are not modelled"),
    (
        r".*per_layer_input|altup_.*|laurel_.*|activation_sparsity_pattern",
        "per-layer inputs and AltUp are not modelled",
    ),
    (r"index_.*|indexer_.*|sparse_attention.*|compress_.*", "sparse attention is not modelled"),
    (r"layers_block_type|block_configs|.*override_pattern|hybrid_.*", "layers of several kinds are not modelled"),
    (
        r"interleave_moe_.*|expert_layer_.*|attn_layer_.*|mlp_layer_types",
        "experts in some layers only are not modelled",
    ),
    (r"swa_.*|global_head_dim|num_global_.*|attention_k_eq_v", "heads that differ by layer are not modelled"),
    (
        r"(shared|dense)_intermediate_size|zero_expert.*|moe_latent_size|use_double_wide_mlp",
        "further MLPs are not modelled",
    ),
    (
        r"draft_vocab_size|eagle_.*",
        "a drafting head is not a model: name its target, with speculation.method = 'eagle'",
    ),
)
"""Fields (patterns of whole names) that no type may have set, and why."""

NOTED = re.compile(r"num_nextn_predict_layers|num_mtp_.*|use_mtp|mtp_.*")
"""Multi-token prediction: served as a drafter or not at all, so left out, with a note."""

HARMLESS = re.compile(
    r".*_token_(id|index|ids)|.*dropout.*|.*pdrop|layerdrop|.*_?eps(ilon)?|.*layer_?norm.*|.*_norm(_type)?|norm_.*|init.*"
    r"|.*bias|_?attn_implementation.*|_experts_implementation|.*softcapping|attention_softmax_in_fp32|scale_att.*|clip_qkv"
    r"|alibi.*|reorder_and_upcast_attn|query_pre_attn_scalar|.*multiplier|hidden_act.*|activation|activation_function"
    r"|mlp_type|n_group|topk_.*|num_expert_group|scoring_func|norm_topk_prob|routed_scaling_factor|aux_loss_alpha|seq_aux"
    r"|ep_size|.*router_.*|use_grouped_mm|max_window_layers|sliding_window_size|qk_head_dim|rope_.*|.*rotary.*"
    r"|no_rope_layer.*|use_parallel_residual|parallel_attn|apply_residual.*|scale_attention.*|multi_query|n_ctx"
    r"|num_ln_in_parallel_attn|pretraining_tp|cache_implementation|use_cache|architectures|auto_map|_name_or_path"
    r"|.*max_position_embeddings|transformers_version|(torch_|expert_)?dtype|quantization(_config)?|swiglu_limit"
    r"|initial_context_length|logits?_scal.*|use_qk_norm|use_mrope|attn_type_list|model_type"
)
"""Fields that change neither the shapes nor the work worth counting."""

SUSPICIOUS = re.compile(
    r"mamba|ssm|conv|recur|linear|delta|cross|encoder|vision|image|audio|video|expert|moe|mlp|intermediate|interleave|ffn"
    r"|layer|head|lora|rank|window|swa|chunk|share|spars|compress|hybrid|pattern|block|vocab|kv|attn|attention|depth|width"
)
"""Part of an unknown field's name that makes it architecture until somebody knows better."""
