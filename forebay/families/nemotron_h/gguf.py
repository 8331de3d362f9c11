from __future__ import annotations

from typing import Final

from forebay.base.errors import brief
from forebay.families.base.architecture import PROJECTIONS, Architecture, Header, Tensors, expert_names, within
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.nemotron_h.config import MLP, MOE
from forebay.families.parts.gguf.mamba import BACKBONE, SSM_KEYS, limit_positions, with_backbone
from forebay.families.parts.gguf.mamba2 import MAMBA2, heads_of, restore_mamba2


def _configure(header: Header) -> None:
    own, config, has = header.own, header.config, header.has
    header.check_sigmoid()
    if own.get("expert_group_count", 1) not in (0, 1):
        raise header.wrong(f"{brief(own['expert_group_count'])} groups of experts: how many are used is not said")
    heads, head_dim, _ = heads_of(header)
    config |= {
        "layers_block_type": header.kinds({"ssm_in": LINEAR, "attn_q": FULL, "ffn_gate_inp": MOE}, MLP),
        "num_key_value_heads": header.kv_heads(),
        "intermediate_size": header.most("feed_forward_length"),
        "layer_norm_epsilon": config.pop("rms_norm_eps", own.get("attention.layer_norm_epsilon")),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "use_conv_bias": has("ssm_conv1d.bias"),
        "use_bias": has("ssm_in.bias"),
        "mlp_bias": has("ffn_up.bias") or has("ffn_up_shexp.bias"),
    }
    limit_positions(config)


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
