"""Cases of the models with Mamba mixers; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

# Names that Bamba gave a Mamba-2 mixer's fields. Chunks are the oracle's own, and shorter than a prompt here.
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

_FALCON_H1_FACTORS = {
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.9,
    "mlp_multipliers": [0.6, 1.3],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.7, 1.1, 0.9, 1.4, 0.6],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
}

_NEMOTRON_H = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 3,
    "ssm_state_size": 12,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "time_step_min": 0.65,
}

_GRANITE_FACTORS = {
    "embedding_multiplier": 3,
    "logits_scaling": 0.6,
    "residual_multiplier": 0.55,
    "attention_multiplier": 0.2,
}

_MAMBA2_ALONE = {"head_dim": 24, "state_size": 16, "expand": 2, "chunk_size": 8}

_JAMBA = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 5,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "rms_norm_eps": 1e-3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}

_ZAMBA2 = {
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "n_mamba_heads": 8,
    "mamba_headdim": 12,
    "adapter_rank": 7,
    "chunk_size": 8,
    "time_step_min": 0.65,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", {**_MAMBA2, **_FALCON_H1_FACTORS, "mamba_d_ssm": 96, "rms_norm_eps": 1e-3}),
    "falcon_h1-norm-after-gate-biases": (
        "falcon_h1",
        {
            **_MAMBA2,
            **_FALCON_H1_FACTORS,
            "mamba_d_ssm": 32,
            "rms_norm_eps": 1e-3,
            "mamba_d_head": "auto",
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.6, 0.75],
            "num_key_value_heads": 4,
        },
    ),
    "falcon_h1-norm-before-gate-tied": (
        "falcon_h1",
        {
            **_MAMBA2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"],
            "n_group": 3,
            "topk_group": 2,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "nemotron_h-biases-latent-experts": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["moe", "mamba", "attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "time_step_min": 0.001,
        },
    ),
    # Nor has this one's.
    "nemotron_h-gguf": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["mamba", "attention", "mlp"], "time_step_min": 0.001},
    ),
    "nemotron_h-no-attention": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["mamba", "mlp"], "n_groups": 1, "conv_kernel": 3},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_GRANITE_FACTORS,
            "layer_types": ["mamba", "attention", "mamba"],
            "rms_norm_eps": 1e-3,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "granitemoehybrid-dense-rope-tied": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "mamba_n_groups": 1,
            "time_step_limit": [0.65, 0.72],
        },
    ),
    # GGUF files of this family have neither rotary embedding nor a limit of the step width.
    "granitemoehybrid-gguf": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-biases-no-attention": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_GRANITE_FACTORS,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_d_conv": 3,
            "attention_bias": True,
        },
    ),
    "mamba2": ("mamba2", {**_MAMBA2_ALONE, "num_heads": 4, "n_groups": 2, "layer_norm_epsilon": 1e-3}),
    "mamba2-biases-tied": (
        "mamba2",
        {
            **_MAMBA2_ALONE,
            "num_heads": 12,
            "head_dim": 8,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
            "time_step_limit": [0.65, 0.72],
        },
    ),
    "mamba": ("mamba", {"state_size": 8, "intermediate_size": 96, "layer_norm_epsilon": 1e-3}),
    "mamba-biases-untied": (
        "mamba",
        {
            "state_size": 5,
            "intermediate_size": 72,
            "time_step_rank": 7,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8, "intermediate_size": 96, "mixer_rms_eps": 1e-3}),
    "falcon_mamba-biases": (
        "falcon_mamba",
        {"state_size": 16, "intermediate_size": 48, "use_bias": True, "time_step_rank": 12, "conv_kernel": 5},
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1], "rms_norm_eps": 1e-3}),
    "bamba-biases-tied": (
        "bamba",
        {
            **_MAMBA2,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 4,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.65, 0.72],
        },
    ),
    "jamba": ("jamba", _JAMBA),
    "jamba-dense-biases-tied": (
        "jamba",
        {
            **_JAMBA,
            "num_experts": 1,
            "attn_layer_offset": 0,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "mamba_dt_rank": "auto",
            "tie_word_embeddings": True,
        },
    ),
    "jamba-no-attention": (
        "jamba",
        {**_JAMBA, "num_hidden_layers": 2, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_offset": 0},
    ),
    "zamba2": (
        "zamba2",
        {**_ZAMBA2, "num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"]},
    ),
    "zamba2-blocks-in-turn-adapters-rope": (
        "zamba2",
        {
            **_ZAMBA2,
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
            # Wider, float32 itself is 1.6e-4 from float64 in this case: no residual goes around the shared blocks.
            "hidden_size": 24,
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "n_mamba_heads": 4,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "add_bias_linear": True,
            "mamba_ngroups": 1,
        },
    ),
    "zamba2-no-attention": ("zamba2", {**_ZAMBA2, "layers_block_type": ["mamba"] * 3, "time_step_min": 0.001}),
}
