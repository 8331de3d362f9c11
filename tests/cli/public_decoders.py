"""Published configurations of decoders that came in November 2026, as facts; see `test_published_counts.py`."""

from __future__ import annotations

from typing import Any, Final

_LLAMA3: Final = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

EXAONE_3_5_7_8B: Final[dict[str, Any]] = {
    "model_type": "exaone", "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
    "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 1000000.0, "rope_scaling": _LLAMA3,
    "attention_dropout": 0.0, "embed_dropout": 0.0, "tie_word_embeddings": False,
    "auto_map": {"AutoConfig": "configuration_exaone.ExaoneConfig"},
}  # fmt: skip

EXAONE_3_5_2_4B: Final[dict[str, Any]] = {
    **EXAONE_3_5_7_8B, "hidden_size": 2560, "intermediate_size": 7168, "num_layers": 30, "head_dim": 80,
    "tie_word_embeddings": True,
}  # fmt: skip

# The factors of LongRoPEs are left out: numbers of the right count stand for them.
PHI_4_MINI: Final[dict[str, Any]] = {
    "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
    "sliding_window": 262144, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}  # fmt: skip

PHI_3_5_MOE: Final[dict[str, Any]] = {
    "model_type": "phimoe", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 131072,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.5] * 64, "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
    },
    "num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
    "input_jitter_noise": 0.01, "router_jitter_noise": 0.01, "router_aux_loss_coef": 0.0, "hidden_dropout": 0.0,
    "tie_word_embeddings": False, "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"},
}  # fmt: skip

APERTUS_8B: Final[dict[str, Any]] = {
    "model_type": "apertus", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5, "rope_theta": 12000000, "rope_scaling": _LLAMA3, "hidden_act": "xielu", "qk_norm": True,
    "post_norm": False, "mlp_bias": False, "attention_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "tie_word_embeddings": False,
}  # fmt: skip

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "microsoft/Phi-4-mini-instruct": (PHI_4_MINI, 3.84),
    "microsoft/Phi-3.5-MoE-instruct": (PHI_3_5_MOE, 41.9),
    "swiss-ai/Apertus-8B-Instruct-2509": (APERTUS_8B, 8.05),
    "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct": (EXAONE_3_5_2_4B, 2.41),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": (EXAONE_3_5_7_8B, 7.82),
}
"""Repositories: fields, and the published number of parameters in billions."""
