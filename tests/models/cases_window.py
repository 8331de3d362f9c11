"""Cases of the models with short convolutions, sliding windows and sinks; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

CONV, FULL, SLIDING = "conv", "full_attention", "sliding_attention"
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

_GEMMA4 = {
    "sliding_window": 6,
    "global_head_dim": 20,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
}

_GEMMA3N = {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "laurel_rank": 10,
    "activation_sparsity_pattern": [0.7, 0.0, 0.95, 0.0],
}
_YARN = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_MINISTRAL = {**_YARN, "beta_fast": 8.0, "beta_slow": 2.0, "llama_4_scaling_beta": 0.7}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": [CONV, FULL, CONV], "block_multiple_of": 8}),
    "lfm2-biases-untied": (
        "lfm2",
        {
            "layer_types": [FULL, CONV, CONV],
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-convolutions-only": (
        "lfm2",
        {"layer_types": [CONV] * 3, "conv_L_cache": 2, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
    ),
    "lfm2_moe": ("lfm2_moe", {**_MOE, "layer_types": [CONV, FULL, CONV], "num_dense_layers": 1}),
    "lfm2_moe-plain-routing": (
        "lfm2_moe",
        {
            **_MOE,
            "layer_types": [FULL, CONV, FULL],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm3": ("lfm3", {"layer_types": [CONV, SLIDING, FULL], "sliding_window": 6}),
    "lfm3-plain": (
        "lfm3",
        {
            "layer_types": [SLIDING, CONV, SLIDING],
            "sliding_window": 9,
            "conv_L_cache": 3,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-pattern": ("lfm3", {"num_hidden_layers": 5, "sliding_window": 5, "head_dim": 20}),
    "gemma3_text": ("gemma3_text", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6}),
    "gemma3_text-biases-linear": (
        "gemma3_text",
        {
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma3_text-pattern": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 5}),
    "gemma3_text-gguf": (  # the format has no keys for the pattern, the second base and the scale
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_text-values-from-keys": (
        "gemma4_text",
        {
            **_GEMMA4,
            "layer_types": [FULL, SLIDING, FULL],
            "sliding_window": 9,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma4_text-experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "layer_types": [SLIDING, FULL, FULL],
            "num_kv_shared_layers": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_text-pattern": ("gemma4_text", {**_GEMMA4, "num_hidden_layers": 8, "num_kv_shared_layers": 1}),
    "gemma3n_text": (
        "gemma3n_text",
        {**_GEMMA3N, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2},
    ),
    "gemma3n_text-other-stream-untied": (
        "gemma3n_text",
        {
            **_GEMMA3N,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "intermediate_size": [80, 64, 40],
            "activation_sparsity_pattern": [0.0, 0.6, 0.3],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
        },
    ),
    "muse_glimmer_text": (
        "muse_glimmer_text",
        {"num_hidden_layers": 5, "sliding_window": 6, "output_multiplier": 1.7, "final_logit_softcapping": 3.0},
    ),
    "muse_glimmer_text-listed-tied": (
        "muse_glimmer_text",
        {
            "layer_types": [FULL, SLIDING, FULL],
            "sliding_window": 5,
            "layer_rope_theta": [10_000.0, 0, 0],
            "qk_scale_factor": 1.3,
            "post_norm_eps": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": ("ministral3", {"rope_parameters": {**_MINISTRAL, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "ministral3-window-tied": (
        "ministral3",
        {
            "sliding_window": 21,
            "tie_word_embeddings": True,
            "rope_parameters": {**_MINISTRAL, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 5},
        },
    ),
    "mellum": (
        "mellum",
        {
            **_MOE,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 6,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 700.0}},
        },
    ),
    "mellum-full-biases-tied": (
        "mellum",
        {**_MOE, "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mellum-gguf": (  # the format has no dense layers
        "mellum",
        {
            **_MOE,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 6,
            "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 700.0}},
        },
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6}),
    "gpt_oss-full-first": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 9,
            "attention_bias": False,
            "num_key_value_heads": 1,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    ),
}
