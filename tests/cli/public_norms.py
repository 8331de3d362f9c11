"""Published configurations of models with LayerNorm or capped scores, as facts; see `test_published_counts.py`."""

from __future__ import annotations

from typing import Any, Final

_GEMMA2: Final = {
    "model_type": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "cache_implementation": "hybrid",
}  # fmt: skip
_COHERE: Final = {
    "vocab_size": 256000, "attention_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-5, "use_cache": True,
}  # fmt: skip
_COHERE2: Final = {
    **_COHERE, "model_type": "cohere2", "cache_implementation": "hybrid", "head_dim": 128, "layer_switch": 4,
    "logit_scale": 0.25, "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True,
}  # fmt: skip
_STARCODER2: Final = {
    "model_type": "starcoder2", "vocab_size": 49152, "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default",
    "norm_type": "layer_norm", "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5, "use_bias": True,
    "sliding_window": 4096, "max_position_embeddings": 16384, "attention_dropout": 0.1, "residual_dropout": 0.1,
    "embedding_dropout": 0.1,
}  # fmt: skip
_STABLELM: Final = {
    "model_type": "stablelm", "max_position_embeddings": 4096, "hidden_act": "silu", "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False, "use_cache": True,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "num_attention_heads": 32,
}  # fmt: skip
_DEEPSEEK_V2: Final = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "tie_word_embeddings": False,
}  # fmt: skip
_YARN: Final = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip

# Windows in all layers but the first and every sixth, experts in all but the first.
MIMO_V2_FLASH: Final[dict[str, Any]] = {
    "model_type": "mimo_v2_flash", "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)], "hybrid_block_size": None,
    "moe_layer_freq": [0] + [1] * 47, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": None,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": None, "rope_theta": 5000000, "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334, "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128,
    "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144, "attention_bias": False, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "google/gemma-2-2b": ({
        **_GEMMA2, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    }, 2.61),
    "google/gemma-2-27b": ({
        **_GEMMA2, "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144,
    }, 27.23),
    "CohereLabs/c4ai-command-r-v01": ({
        **_COHERE, "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": 64, "max_position_embeddings": 8192, "logit_scale": 0.0625,
        "model_max_length": 131072, "rope_theta": 8000000.0, "use_qk_norm": False,
    }, 34.98),
    "CohereLabs/c4ai-command-r-plus": ({
        **_COHERE, "model_type": "cohere", "hidden_size": 12288, "intermediate_size": 33792, "num_hidden_layers": 64,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "logit_scale": 0.8333333333333334, "model_max_length": 131072, "rope_theta": 75000000.0, "use_qk_norm": True,
    }, 103.81),
    "CohereLabs/c4ai-command-r7b-12-2024": ({
        **_COHERE2, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 8192,
    }, 8.03),
    "CohereLabs/c4ai-command-a-03-2025": ({
        **_COHERE2, "hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 64,
        "num_attention_heads": 96, "max_position_embeddings": 131072,
    }, 111.06),
    "bigcode/starcoder2-3b": ({
        **_STARCODER2, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "rope_theta": 999999.4420358813,
    }, 3.03),
    "bigcode/starcoder2-7b": ({
        **_STARCODER2, "hidden_size": 4608, "intermediate_size": 18432, "num_hidden_layers": 32,
        "num_attention_heads": 36, "num_key_value_heads": 4, "rope_theta": 1000000,
    }, 7.17),
    "stabilityai/stablelm-3b-4e1t": ({
        **_STABLELM, "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "use_qkv_bias": False,
    }, 2.80),
    "stabilityai/stablelm-2-1_6b": ({
        **_STABLELM, "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_key_value_heads": 32, "use_qkv_bias": True, "rope_scaling": None,
    }, 1.64),
    "stabilityai/stablelm-2-12b": ({
        **_STABLELM, "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True,
    }, 12.14),
    "deepseek-ai/DeepSeek-V2-Lite": ({
        **_DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    }, 15.71),
    "deepseek-ai/DeepSeek-V2": ({
        **_DEEPSEEK_V2, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160,
        "moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }, 235.74),
    "XiaomiMiMo/MiMo-V2-Flash": (MIMO_V2_FLASH, 309.0),
}  # fmt: skip
"""Repositories: fields, and the published number of parameters in billions."""
