"""Tiny configurations of models with compressed attention."""

from __future__ import annotations

from typing import Any

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

_V4 = {
    "max_position_embeddings": 512,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _SPARSE, _HEAVY, _SPARSE],
    "compress_rates": {_SPARSE: 4, _HEAVY: 8},
    "sliding_window": 6,
    "q_lora_rank": 24,
    "partial_rotary_factor": 0.5,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 3,
    "hc_mult": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hash_layers": 1,
    "swiglu_limit": 0.5,
}

_LINEAR, _FULL = "linear_attention", "full_attention"
_POOLED = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "layer_types": [_LINEAR, _FULL, _FULL, _LINEAR],
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 8,
    "index_kpool": 4,
    "hc_mult": 2,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": ("deepseek_v4", _V4),
    "deepseek_v4-short-blocks": ("deepseek_v4", {**_V4, "compress_rates": {_SPARSE: 2, _HEAVY: 4}, "index_topk": 5}),
    "glm5_next_text": ("glm5_next_text", _POOLED),
    "glm5_next_text-shared-softplus": (
        "glm5_next_text",
        {
            **_POOLED,
            "indexer_types": ["full", "full", "shared", "full"],
            "index_topk": 6,
            "index_kpool": 2,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 3,
            "linear_lower_bound": None,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 0.7,
        },
    ),
    "glm5_next_text-published-fields": (
        "glm5_next_text",
        {
            **_POOLED,
            "layer_types": None,
            "mlp_layer_types": None,
            "index_topk": 2048,
            "index_kpool": 16,
            "linear_attn_config": {
                "head_dim": 8,
                "num_heads": 2,
                "short_conv_kernel_size": 3,
                "gate_lower_bound": -2.0,
            },
            "swiglu_limit": 10.0,
        },
    ),
    "deepseek_v4-yarn": (
        "deepseek_v4",
        {
            **_V4,
            "layer_types": [_HEAVY, _SPARSE, _SLIDING, _HEAVY],
            "num_hash_layers": 2,
            "sliding_window": 10,
            "index_topk": 512,
            "index_head_dim": 8,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 2,
            "o_groups": 4,
            "swiglu_limit": 10.0,
            "rope_theta": 500.0,
            "compress_rope_theta": 3_000.0,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
}
