"""Cases of models with LayerNorm, capped scores, or windows with heads of their own; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"

_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
_EVEN_QUARTERS = {"hidden_size": 64, "head_dim": 16}  # of heads
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

_MIMO = {
    **_EXPERTS,
    "head_dim": 24,
    "v_head_dim": 10,
    "num_key_value_heads": 2,
    "sliding_window": 6,
}


def _ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default", "partial_rotary_factor": 0.5}
    return {"rope_parameters": {FULL: {**plain, **full}, SLIDING: {**plain, **sliding}}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {"sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma2-full-first-no-caps": (
        "gemma2",
        {
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 9,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma2-gguf": (  # the format has no key for the scale
        "gemma2",
        {"sliding_window": 5, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "num_hidden_layers": 4},
    ),
    "cohere2": ("cohere2", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "logit_scale": 0.25}),
    "cohere2-pattern-biases-untied": (
        "cohere2",
        {"num_hidden_layers": 5, "sliding_window": 5, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2-gguf": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 5}),  # nor for biases
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere-plain-biases-untied": (
        "cohere",
        {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": None},
    ),
    "stablelm": ("stablelm", _EVEN_QUARTERS),
    "stablelm-parallel-qk-norm-biases-tied": (
        "stablelm",
        {
            **_EVEN_QUARTERS,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "starcoder2-no-window": ("starcoder2", {}),
    "starcoder2-no-biases-untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, **_EXPERTS, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 2},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 5_000.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**_MIMO, "layer_types": [SLIDING, FULL, SLIDING], "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | _ropes({"rope_theta": 5_000.0}, {"rope_theta": 700.0, "partial_rotary_factor": 0.334}),
    ),
    "mimo_v2_flash-groups-biases": (
        "mimo_v2_flash",
        {
            **_MIMO,
            "layer_types": [FULL, SLIDING, FULL],
            "num_key_value_heads": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "attention_bias": True,
            "attention_value_scale": None,
            "tie_word_embeddings": True,
        },
    ),
    "mimo_v2_flash-pattern": ("mimo_v2_flash", {**_MIMO, "num_hidden_layers": 7}),
}
