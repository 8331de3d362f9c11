"""Cases of the models with short convolutions, sliding windows and sinks; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

CONV, FULL = "conv", "full_attention"
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": [CONV, FULL, CONV], "block_multiple_of": 8}),
    "lfm2-biases-untied": (
        "lfm2",
        {
            "layer_types": [FULL, CONV, CONV],
            "conv_L_cache": 4,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-convolutions-only": (
        "lfm2",
        {"layer_types": [CONV] * 3, "conv_L_cache": 2, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
    ),
    "lfm2_moe": ("lfm2_moe", {**_MOE, "layer_types": [CONV, FULL, CONV], "num_dense_layers": 1}),
    "lfm2_moe-plain-routing": (
        "lfm2_moe",
        {
            **_MOE,
            "layer_types": [FULL, CONV, FULL],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
        },
    ),
}
