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

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct": (EXAONE_3_5_2_4B, 2.41),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": (EXAONE_3_5_7_8B, 7.82),
}
"""Repositories: fields, and the published number of parameters in billions."""
