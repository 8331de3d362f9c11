"""Cases of models with experts; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, DENSE, SPARSE = "full_attention", "sliding_attention", "dense", "sparse"

_LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_GROUPED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_WIDE = {"num_local_experts": 6, "num_experts_per_tok": 3}
_QWEN2 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24}
_HY = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_YARN = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 4.0}

_LONG_FACTORS = [2.0, 2.5, 3.0, 4.0, 6.0, 9.0]
_PHIMOE = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # transformers 5.24 takes phimoe's short factors at any length, and only the amplitude by the length.
    "phimoe": (
        "phimoe",
        {
            **_PHIMOE,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5_000.0,
                "short_factor": _LONG_FACTORS,
                "long_factor": _LONG_FACTORS,
                "short_mscale": 1.4,
                "long_mscale": 1.25,
                "original_max_position_embeddings": 4,
            },
        },
    ),
    "phimoe-gguf": (  # what files do not say is as published
        "phimoe",
        {
            **_PHIMOE,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5_000.0,
                "short_factor": _LONG_FACTORS,
                "long_factor": _LONG_FACTORS,
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4,
            },
        },
    ),
    "phimoe-window-tied": ("phimoe", {**_PHIMOE, "sliding_window": 6, "tie_word_embeddings": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_GROUPED, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite-groups-halves-biases-yarn": (
        "glm4_moe_lite",
        {
            **_LATENT,
            **_GROUPED,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "mlp_layer_types": [SPARSE, DENSE, SPARSE],
            "tie_word_embeddings": True,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_GROUPED, "head_dim": 16, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe-plain-whole-heads-tied": (
        "glm4_moe",
        {
            **_GROUPED,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LINEAR, "partial_rotary_factor": 1.0},
        },
    ),
    "mixtral": ("mixtral", _WIDE),
    "mixtral-window-tied": ("mixtral", {**_WIDE, "sliding_window": 6, "tie_word_embeddings": True, "head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", _QWEN2),
    "qwen2_moe-windows-some-dense": (
        "qwen2_moe",
        {
            **_QWEN2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": ("minimax_m2", {**_WIDE, "head_dim": 16, "rotary_dim": 8}),
    "minimax_m2-whole-heads-tied": (
        "minimax_m2",
        {**_WIDE, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": _LINEAR},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-biases-shares-tied": (
        "olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {**_ERNIE, "moe_norm_min": 0.7}),
    "ernie4_5_moe-gguf": ("ernie4_5_moe", {**_ERNIE, "moe_layer_interval": 2}),  # the format has no key for the least
    "ernie4_5_moe-untied-none-shared": (
        "ernie4_5_moe",
        {
            **_ERNIE,
            "tie_word_embeddings": False,
            "moe_num_shared_experts": 0,
            "num_hidden_layers": 4,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "rope_parameters": _LINEAR,
        },
    ),
    "hy_v3": ("hy_v3", {**_HY, "head_dim": 16, "num_shared_experts": 2}),
    "hy_v3-biases-listed-tied": (
        "hy_v3",
        {
            **_HY,
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_layer_types": [SPARSE, DENSE, SPARSE],
            "router_scaling_factor": 1.3,
            "enable_moe_fp32_combine": False,
            "tie_word_embeddings": True,
        },
    ),
    "solar_open": ("solar_open", {**_GROUPED, "attention_bias": True}),
    "solar_open-plain-yarn-tied": (
        "solar_open",
        {
            **_GROUPED,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
    ),
    "dots1": (
        "dots1",
        {
            **_GROUPED,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "max_window_layers": 2,
            "sliding_window": 6,
        },
    ),
    "dots1-gguf": (  # of windows the format says nothing
        "dots1",
        {**_GROUPED, "n_shared_experts": 1, "attention_bias": True, "sliding_window": None},
    ),
    "dots1-listed-windows-tied": (
        "dots1",
        {
            **_GROUPED,
            "n_shared_experts": 1,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
}
