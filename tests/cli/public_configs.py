"""The shapes of published models, as facts: field values only, for planning without their weights."""

from __future__ import annotations

from typing import Any, Final

FALCON_H1_0_5B: Final[dict[str, Any]] = {
    "model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 16384, "rope_theta": 1e11, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_norm_before_gate": False, "mamba_use_mlp": True, "projectors_bias": False,
}  # fmt: skip

# As transformers' configuration class has it by default.
DEEPSEEK_V4_FLASH: Final[dict[str, Any]] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "num_experts_per_tok": 6, "n_routed_experts": 256, "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "rope_theta": 10000,
    "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "swiglu_limit": 10.0, "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip

# By the shapes of the published tensors.
DEEPSEEK_V4_PRO: Final[dict[str, Any]] = {
    **DEEPSEEK_V4_FLASH, "hidden_size": 7168, "moe_intermediate_size": 3072, "num_hidden_layers": 61,
    "num_attention_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 384, "o_groups": 16,
}  # fmt: skip

QWEN3_NEXT_80B_A3B: Final[dict[str, Any]] = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip

NEMOTRON_H_8B: Final[dict[str, Any]] = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "num_hidden_layers": 52, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "expand": 2, "chunk_size": 128, "mlp_hidden_act": "relu2", "tie_word_embeddings": False,
}  # fmt: skip

GEMMA_3_27B: Final[dict[str, Any]] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "query_pre_attn_scalar": 168, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024,
    "sliding_window_pattern": 6,
}  # fmt: skip

QWEN3_8B: Final[dict[str, Any]] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip

QWEN3_30B_A3B: Final[dict[str, Any]] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip

GPT_OSS_20B: Final[dict[str, Any]] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rope_theta": 150000, "rms_norm_eps": 1e-5, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32, "num_experts_per_tok": 4,
    "attention_bias": True, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip

GPT_OSS_20B_BYTES: Final = 13_761_264_768  # of its tensors, by the index of its files

LLAMA_3_8B: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip

SMOLLM2_135M: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rope_theta": 100000, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
