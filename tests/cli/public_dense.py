"""Published configurations of dense models, as facts; see `test_published_counts.py`."""

from __future__ import annotations

from typing import Any, Final

_WINDOWS: Final = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

OLMO_3_7B: Final[dict[str, Any]] = {
    "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096, "layer_types": _WINDOWS * 8,
    "attention_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1,
        "attention_factor": 1.2079441541679836,
    },
}  # fmt: skip

GRANITE_3_3_2B: Final[dict[str, Any]] = {
    "model_type": "granite", "vocab_size": 49159, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}  # fmt: skip

GRANITE_3_0_1B_A400M: Final[dict[str, Any]] = {
    "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1024, "intermediate_size": 512,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
    "num_local_experts": 32, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.0, "output_router_logits": False,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}  # fmt: skip

EXAONE_4_0_1_2B: Final[dict[str, Any]] = {
    "model_type": "exaone4", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 4096,
    "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "sliding_window": None,
    "sliding_window_pattern": None, "layer_types": ["full_attention"] * 30, "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

EXAONE_4_0_32B: Final[dict[str, Any]] = {
    **EXAONE_4_0_1_2B, "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
    "num_attention_heads": 40, "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 4096,
    "sliding_window_pattern": "LLLG", "layer_types": _WINDOWS * 16, "tie_word_embeddings": False,
}  # fmt: skip

K_EXAONE_236B_A23B: Final[dict[str, Any]] = {
    "model_type": "exaone_moe", "vocab_size": 153600, "hidden_size": 6144, "intermediate_size": 18432,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": 128, "sliding_window_pattern": "LLLG", "layer_types": _WINDOWS * 12,
    "first_last_k_dense_replace": 1, "is_moe_layer": [False] + [True] * 47, "num_experts": 128,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip

_HUNYUAN_ROPE: Final = {
    "type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 0.0,
}  # fmt: skip

HUNYUAN_7B: Final[dict[str, Any]] = {
    "model_type": "hunyuan_v1_dense", "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "attention_head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": _HUNYUAN_ROPE, "use_qk_norm": True, "use_cla": False, "mlp_bias": False, "attention_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip

HUNYUAN_A13B: Final[dict[str, Any]] = {
    **HUNYUAN_7B, "model_type": "hunyuan_v1_moe", "intermediate_size": 3072, "num_experts": 64, "moe_topk": [8] * 32,
    "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32, "moe_layer_num_skipped": 0,
    "use_mixed_mlp_moe": True, "norm_topk_prob": True, "routed_scaling_factor": False,
}  # fmt: skip

SEED_OSS_36B: Final[dict[str, Any]] = {
    "model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
    "rope_scaling": {"rope_type": "default"}, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
    "attention_dropout": 0.1, "residual_dropout": 0.1, "tie_word_embeddings": False,
}  # fmt: skip

INTERNLM3_8B: Final[dict[str, Any]] = {
    "model_type": "internlm3", "vocab_size": 128512, "hidden_size": 4096, "intermediate_size": 10240,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 50000000,
    "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "bias": False, "qkv_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip

AFM_4_5B: Final[dict[str, Any]] = {
    "model_type": "arcee", "vocab_size": 128005, "hidden_size": 2560, "intermediate_size": 18432,
    "num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "relu2",
    "rope_scaling": {
        "rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0,
    },
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

_GEMMA: dict[str, Any] = {
    "model_type": "gemma", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA_2B = {
    **_GEMMA, "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}  # fmt: skip
GEMMA_7B = {**_GEMMA, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
GLM_4_9B = {
    "model_type": "glm", "attention_bias": True, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 13696, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "allenai/Olmo-3-1025-7B": (OLMO_3_7B, 7.30),
    "ibm-granite/granite-3.3-2b-instruct": (GRANITE_3_3_2B, 2.53),
    "ibm-granite/granite-3.0-1b-a400m-base": (GRANITE_3_0_1B_A400M, 1.33),
    "google/gemma-2b": (GEMMA_2B, 2.506),
    "google/gemma-7b": (GEMMA_7B, 8.538),
    "zai-org/glm-4-9b-chat-hf": (GLM_4_9B, 9.40),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (EXAONE_4_0_1_2B, 1.28),
    "LGAI-EXAONE/EXAONE-4.0-32B": (EXAONE_4_0_32B, 32.0),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": (K_EXAONE_236B_A23B, 236.0),
    "tencent/Hunyuan-7B-Instruct": (HUNYUAN_7B, 7.50),
    "tencent/Hunyuan-A13B-Instruct": (HUNYUAN_A13B, 80.4),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (SEED_OSS_36B, 36.15),
    "internlm/internlm3-8b-instruct": (INTERNLM3_8B, 8.80),
    "arcee-ai/AFM-4.5B": (AFM_4_5B, 4.62),
}
"""Repositories: fields, and the published number of parameters in billions."""
