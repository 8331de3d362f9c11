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

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": ("deepseek_v4", _V4),
    "deepseek_v4-short-blocks": ("deepseek_v4", {**_V4, "compress_rates": {_SPARSE: 2, _HEAVY: 4}, "index_topk": 5}),
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
