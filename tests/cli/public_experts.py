"""Published configurations of models with experts, as facts; see `test_published_counts.py`."""

from __future__ import annotations

from typing import Any, Final

_GLM: Final[dict[str, Any]] = {
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
    "attention_bias": True, "max_position_embeddings": 131072, "rope_theta": 1000000, "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "vocab_size": 151552, "tie_word_embeddings": False,
}  # fmt: skip

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "zai-org/GLM-4.7-Flash": (
        {
            "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
            "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
            "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
            "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
            "max_position_embeddings": 202752, "rope_theta": 1000000, "rope_scaling": None,
            "partial_rotary_factor": 1.0, "attention_bias": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        30.0,
    ),
    "zai-org/GLM-4.5-Air": (
        {
            **_GLM, "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
            "n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "use_qk_norm": False,
            "routed_scaling_factor": 1.0,
        },
        106.0,
    ),
    "zai-org/GLM-4.5": (
        {
            **_GLM, "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
            "n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
        355.0,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        {
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
        },
        46.7,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "max_position_embeddings": 8192,
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 32768,
            "max_window_layers": 21, "tie_word_embeddings": False,
        },
        14.3,
    ),
    "MiniMaxAI/MiniMax-M2": (
        {
            "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
            "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
            "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
            "max_position_embeddings": 196608, "rope_theta": 5000000, "rms_norm_eps": 1e-6, "sliding_window": None,
            "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "attn_type_list": [1] * 62,
            "tie_word_embeddings": False,
        },
        230.0,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {
            "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096, "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5, "clip_qkv": None, "attention_bias": False, "tie_word_embeddings": False,
        },
        6.9,
    ),
    "baidu/ERNIE-4.5-300B-A47B-PT": (
        {
            "model_type": "ernie4_5_moe", "vocab_size": 103424, "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 54, "num_attention_heads": 64, "num_key_value_heads": 8, "moe_num_experts": 64,
            "moe_k": 8, "moe_num_shared_experts": 0, "moe_intermediate_size": 3584, "moe_layer_start_index": 3,
            "moe_layer_end_index": 53, "moe_layer_interval": 1, "moe_use_aux_free": True, "use_bias": False,
            "max_position_embeddings": 131072, "rope_theta": 500000, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        300.0,
    ),
    "tencent/Hy3": (
        {
            "model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
            "expert_hidden_dim": 1536, "first_k_dense_replace": 1, "router_scaling_factor": 2.826, "qk_norm": True,
            "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
            "enable_moe_fp32_combine": False, "enable_lm_head_fp32": True, "num_nextn_predict_layers": 1,
            "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        295.0,
    ),
    "upstage/Solar-Open-100B": (
        {
            "model_type": "solar_open", "vocab_size": 196608, "hidden_size": 4096, "intermediate_size": 10240,
            "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
            "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
            "partial_rotary_factor": 1.0, "max_position_embeddings": 131072, "rope_theta": 1000000,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        102.6,
    ),
    "rednote-hilab/dots.llm1.inst": (
        {
            "model_type": "dots1", "vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944,
            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 128,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "first_k_dense_replace": 1,
            "max_position_embeddings": 32768, "rope_theta": 10000000, "rms_norm_eps": 1e-5, "attention_bias": False,
            "tie_word_embeddings": False,
        },
        142.0,
    ),
}  # fmt: skip
"""Repositories: fields, and the published number of parameters in billions."""
