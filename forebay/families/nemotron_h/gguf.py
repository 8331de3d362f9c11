from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families.architecture import (
    PROJECTIONS,
    Architecture,
    Tensors,
    at,
    check_sigmoid,
    expert_names,
    has,
    kv_heads,
    layer_range,
    most,
    within,
)
from forebay.families.mamba.gguf import BACKBONE, SSM_KEYS, limit_positions, with_backbone
from forebay.families.mamba2.gguf import MAMBA2, heads_of, restore_mamba2
from forebay.families.nemotron_h.config import MLP, MOE
from forebay.families.transformer import FULL, LINEAR
from forebay.formats.gguf import GgufFile


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    check_sigmoid(file, own)
    if own.get("expert_group_count", 1) not in (0, 1):
        raise ModelError(
            f"{file.path}: {brief(own['expert_group_count'])} groups of experts: how many are used is not said"
        )
    heads, head_dim, _ = heads_of(file, own)
    config |= {
        "layers_block_type": [_layer_type(file, layer) for layer in layer_range(file, config)],
        "num_key_value_heads": kv_heads(own, config),
        "intermediate_size": most(own, "feed_forward_length"),
        "layer_norm_epsilon": config.pop("rms_norm_eps", own.get("attention.layer_norm_epsilon")),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "use_conv_bias": has(file, "ssm_conv1d.bias"),
        "use_bias": has(file, "ssm_in.bias"),
        "mlp_bias": has(file, "ffn_up.bias") or has(file, "ffn_up_shexp.bias"),
    }
    limit_positions(config)


def _layer_type(file: GgufFile, layer: int) -> str:
    for sign, kind in (("ssm_in", LINEAR), ("attn_q", FULL), ("ffn_gate_inp", MOE)):
        if at(file, layer, f"{sign}.weight"):
            return kind
    return MLP


def _restore(tensors: Tensors) -> Tensors:
    name = "gate.e_score_correction"
    renamed = {stored.replace(f"{name}.bias", f"{name}_bias"): tensor for stored, tensor in tensors.items()}
    return with_backbone(restore_mamba2, renamed)


_NEMOTRON_H: Final = Architecture(
    interleaved_rope=True,
    top_names=BACKBONE,
    block_names={
        **within("mixer", {**MAMBA2, **PROJECTIONS, "ffn_up": "up_proj", "ffn_down": "down_proj"}),
        "attn_norm": "norm",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction",
        **expert_names("mixer", {"ffn_up": "up_proj", "ffn_down": "down_proj"}),
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    keys={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "expert_count": "n_routed_experts",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "moe_latent_size": "moe_latent_size",
    },
    checked=(
        *SSM_KEYS,
        "attention.head_count_kv",
        "attention.layer_norm_epsilon",
        "feed_forward_length",
        "expert_shared_count",
        "expert_group_count",
        "expert_gating_func",
    ),
    configure=_configure,
    restore=_restore,
)

ARCHITECTURES: Final = {"nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H}
