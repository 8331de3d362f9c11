"""The shapes of the models that are measured on a GPU, and small ones of the same types."""

from __future__ import annotations

from typing import Any, Final

_COMMON: Final[dict[str, Any]] = {"max_position_embeddings": 40_960, "tie_word_embeddings": False}

MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": {  # Llama-3.1-8B
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **_COMMON,
    },
    "falcon_h1": {  # Falcon-H1-7B
        "vocab_size": 130_048,
        "hidden_size": 3072,
        "num_hidden_layers": 44,
        "intermediate_size": 12_288,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        **_COMMON,
    },
    "gpt_oss": {  # gpt-oss-20b
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        **_COMMON,
    },
    "qwen3_5_text": {  # Qwen3.5-9B
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 12_288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **_COMMON,
    },
    "qwen3_moe": {  # half of Qwen3-30B-A3B
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        **_COMMON,
    },
}

# Each matrix has inputs of whole groups of 128.
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TINY: Final[dict[str, dict[str, Any]]] = {
    "llama": _SMALL,
    "falcon_h1": _SMALL | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "gpt_oss": _SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_text": _SMALL
    | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "qwen3_moe": _SMALL | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
}
