"""Cases of dense models; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"

_YARN = {"rope_type": "yarn", "rope_theta": 5_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 4.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# As published, where the other fields have no effect.
_ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}

_MULTIPLIERS = {
    "embedding_multiplier": 5.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
_GRANITE_MOE = {**_MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}

_EXAONE_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 6,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": (
        "olmo3",
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 6,
            "rope_parameters": {
                FULL: {**_YARN, "attention_factor": 1.25, "beta_fast": 8.0, "beta_slow": 2.0},
                SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "olmo3-pattern-biases-tied": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 5, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite": ("granite", {**_MULTIPLIERS, "head_dim": 16}),
    "granite-biases-tied-scaled": (
        "granite",
        {
            **_MULTIPLIERS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3,
        },
    ),
    "granitemoe": ("granitemoe", _GRANITE_MOE),
    "granitemoe-biases-tied": (
        "granitemoe",
        {**_GRANITE_MOE, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _LINEAR},
    ),
    "granite_swa": (
        "granite_swa",
        {
            **_MULTIPLIERS,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 6,
            "layer_rope_theta": [0, 10_000.0, 10_000.0],
        },
    ),
    "granite_swa-ropes-biases-untied": (
        "granite_swa",
        {
            **_MULTIPLIERS,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "layer_rope_theta": [0, 700.0, 0, 5_000.0, 700.0],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **_GRANITE_MOE,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 6,
            "layer_rope_theta": [0, 700.0, 5_000.0],
        },
    ),
    "granitemoe_swa-shared-biases-tied": (
        "granitemoe_swa",
        {
            **_GRANITE_MOE,
            "sliding_window": 5,
            "shared_intermediate_size": 40,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LINEAR,
        },
    ),
    "gemma": ("gemma", {}),
    "gemma-biases-untied": (
        "gemma",
        {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False, "rope_parameters": _LINEAR},
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm-no-biases-tied-whole-heads": (
        "glm",
        {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LINEAR, "partial_rotary_factor": 1.0},
        },
    ),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE_MOE, "shared_intermediate_size": 40}),
    "granitemoeshared-without": ("granitemoeshared", {**_GRANITE_MOE, "shared_intermediate_size": 0}),
    "apertus": ("apertus", {"rope_parameters": _LLAMA3}),
    "apertus-biases-tied": (
        "apertus",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _LINEAR},
    ),
    "exaone": ("exaone", {"rope_parameters": _LLAMA3}),
    "exaone-biases-tied": ("exaone", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "rope_parameters": _LLAMA3}),
    "exaone4-pattern": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2}),
    "exaone4-no-window-tied": (
        "exaone4",
        {"layer_types": [FULL] * 3, "sliding_window": None, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "exaone_moe": ("exaone_moe", _EXAONE_MOE),
    "exaone_moe-groups": (
        "exaone_moe",
        {
            **_EXAONE_MOE,
            "n_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "norm_topk_prob": False,
        },
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": {**_ALPHA, "rope_theta": 5_000.0}}),
    "hunyuan_v1_dense-biases-tied": (
        "hunyuan_v1_dense",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _LINEAR},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 6,
            "moe_topk": 3,
            "intermediate_size": 24,
            "rope_parameters": {**_ALPHA, "rope_theta": 5_000.0},
        },
    ),
    "hunyuan_v1_moe-listed-biases-tied": (
        "hunyuan_v1_moe",
        {
            "num_experts": 4,
            "moe_topk": [2, 2, 2],
            "intermediate_size": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "seed_oss-other-biases-tied": (
        "seed_oss",
        {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LINEAR,
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "internlm3-biases-dynamic-tied": (
        "internlm3",
        {
            "qkv_bias": True,
            "bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5_000.0, "factor": 6.0},
        },
    ),
    "arcee": ("arcee", {"rope_parameters": {**_YARN, "mscale": 1.0}}),
    "arcee-biases-tied": (
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
}
