"""Cases of the models with gated delta nets, Kimi delta attention and latent attention; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"

_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 16,
}
_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
_LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "moe_intermediate_size": 24,
}
_SPARSE = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 6,
}
_KIMI = {
    **_LATENT,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_experts": 6,
    "num_experts_per_token": 2,
}
_LING = {
    **_LATENT,
    "head_dim": 12,
    "layer_types": [LINEAR, FULL, LINEAR],
    "first_k_dense_replace": 1,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "n_group": 4,
    "topk_group": 2,
}
# transformers writes the convolutions of q, k and v as equal thirds of one: here they are.
_OLMO = {**_DELTA_NET, "head_dim": 12, "linear_num_value_heads": 4, "linear_value_head_dim": 4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen3_5_text", _DELTA_NET),
    "qwen3_5_text-one-key-head-biases-tied": (
        "qwen3_5_text",
        {
            **_DELTA_NET,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 20,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_text-pattern": (
        "qwen3_5_text",
        {
            **_DELTA_NET,
            "layer_types": None,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 5_000.0,
                "factor": 4.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "qwen3_5_text-no-attention": (
        "qwen3_5_text",
        {**_DELTA_NET, "layer_types": [LINEAR] * 2, "num_hidden_layers": 2, "linear_num_key_heads": 6},
    ),
    "qwen3_next": ("qwen3_next", {**_DELTA_NET, **_MOE}),
    "qwen3_next-some-dense-biases": (
        "qwen3_next",
        {
            **_DELTA_NET,
            **_MOE,
            "linear_num_key_heads": 3,
            "num_hidden_layers": 4,
            "layer_types": None,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen3_next-one-head": (
        "qwen3_next",
        {
            **_DELTA_NET,
            **_MOE,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA_NET, **_MOE}),
    "qwen3_5_moe_text-all-experts": (
        "qwen3_5_moe_text",
        {
            **_DELTA_NET,
            **_MOE,
            "layer_types": [FULL, LINEAR, LINEAR],
            "num_experts_per_tok": 6,
            "linear_value_head_dim": 5,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN,
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_LATENT,
            "head_dim": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "mistral4-groups-biases-tied": (
        "mistral4",
        {
            **_LATENT,
            "head_dim": 20,
            "q_lora_rank": None,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 20,
                "llama_4_scaling_beta": 0.2,
            },
        },
    ),
    # As the converter writes it: one number for mscale and mscale_all_dim, and the usual scale of queries.
    "mistral4-gguf": (
        "mistral4",
        {
            **_LATENT,
            "head_dim": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "mscale": 0.8,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    # The format has one number for two: mscale and mscale_all_dim.
    "deepseek_v3-gguf": (
        "deepseek_v3",
        {
            **_LATENT,
            "first_k_dense_replace": 2,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.8,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "deepseek_v3-plain-routing-biases": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.7,
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3-dense": (
        "deepseek_v3",
        {**_LATENT, "first_k_dense_replace": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 40},
    ),
    "deepseek_v32": ("deepseek_v32", _SPARSE),
    "deepseek_v32-yarn": (
        "deepseek_v32",
        {
            **_SPARSE,
            "index_topk": 1,
            "index_n_heads": 1,
            "index_head_dim": 8,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v32-all-selected": ("deepseek_v32", {**_SPARSE, "index_topk": 2048, "index_head_dim": 128}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_SPARSE, "indexer_types": ["full", "full", "shared"]}),
    "glm_moe_dsa-shared": (
        "glm_moe_dsa",
        {**_SPARSE, "index_topk": 3, "indexer_types": ["full", "shared", "shared"], "index_n_heads": 5},
    ),
    "kimi_linear": ("kimi_linear", _KIMI),
    "kimi_linear-grouped-plain-routing": (
        "kimi_linear",
        {
            **_KIMI,
            "q_lora_rank": None,
            "layer_types": [FULL, LINEAR, LINEAR],
            "linear_num_heads": 1,
            "linear_head_dim": 20,
            "linear_conv_kernel_dim": 2,
            "num_expert_group": 3,
            "topk_group": 2,
            "num_experts_per_token": 4,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
    "kimi_linear-gguf": (  # the format has one number of heads for both kinds of layers
        "kimi_linear",
        {**_KIMI, "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "q_lora_rank": None},
    ),
    "kimi_linear-published-fields": (
        "kimi_linear",
        {
            **_LATENT,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
            },
            "first_k_dense_replace": 2,
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", _LING),
    "bailing_hybrid-softplus-biases": (
        "bailing_hybrid",
        {
            **_LING,
            "layer_types": None,
            "layer_group_size": 2,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 0,
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "kda_safe_gate": False,
            "short_conv_kernel_size": 3,
            "attention_bias": True,
            "rope_theta": 700.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bailing_hybrid-other-bound": (
        "bailing_hybrid",
        {**_LING, "q_lora_rank": None, "kda_lower_bound": -1.5, "n_shared_experts": 3},
    ),
    "olmo_hybrid": ("olmo_hybrid", _OLMO),
    "olmo_hybrid-no-rope-biases-tied": (
        "olmo_hybrid",
        {
            **_OLMO,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "olmo_hybrid-pattern": (
        "olmo_hybrid",
        {**_OLMO, "layer_types": None, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 4},
    ),
}
