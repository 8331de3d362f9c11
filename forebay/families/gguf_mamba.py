"""GGUF files of models with Mamba mixers: their names, metadata and stored forms, as llama.cpp's converter writes them.

Left out: Bamba, which shares Granite's architecture (the files do not say how its half-rotated heads are stored);
Falcon-H1 with a norm in its mixers (they do not say whether it comes before the gate) or with tied embeddings (two
multipliers are folded into one tensor); Zamba 2, which has no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families.architecture import TOP_NAMES, Architecture
from forebay.families.gguf_mixers import (
    restore_falcon_h1,
    restore_granite,
    restore_mamba1,
    restore_mamba2,
    restore_nemotron_h,
    with_backbone,
)
from forebay.families.mamba_fields import MAMBA, MLP, MOE
from forebay.families.transformer import FULL
from forebay.formats.gguf import GgufFile

_SIGMOID: Final = 2  # llama.cpp's number of that gating function

# The converter's context length of a model without positions, whatever the configuration says.
_NO_CONTEXT: Final = 1 << 20
_POSITIONS: Final = 1 << 17

_BACKBONE: Final = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FINAL_NORM: Final = {**TOP_NAMES, "output_norm": "model.final_layernorm"}
_ATTENTION: Final = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_MIXER: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
_MAMBA1: Final = {**_MIXER, "ssm_x": "x_proj", "ssm_dt": "dt_proj"}
_MAMBA2: Final = {**_MIXER, "ssm_dt": "dt", "ssm_norm": "norm"}
_JAMBA: Final = {**_MAMBA1, "ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm", "ssm_c_norm": "c_layernorm"}
_GATED: Final = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_SSM_KEYS: Final = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


def _within(part: str, names: Mapping[str, str]) -> dict[str, str]:
    return {stored: f"{part}.{name}" for stored, name in names.items()}


def _experts(part: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{stored}_exps": f"{part}.experts.{{}}.{name}" for stored, name in names.items()}


def _configure_mamba(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _without_attention(file, config)
    if own.get("ssm.dt_b_c_rms"):
        config["model_type"] = "falcon_mamba"
    config["intermediate_size"] = own.get("ssm.inner_size")


def _configure_mamba2(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    _without_attention(file, config)
    heads, head_dim, inner = _heads(file, own)
    config |= {"num_heads": heads, "head_dim": head_dim, "expand": _expansion(file, config, inner)}


def _without_attention(file: GgufFile, config: dict[str, Any]) -> None:
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps", None)
    config["use_bias"] = _has(file, "ssm_in.bias")
    config["use_conv_bias"] = _has(file, "ssm_conv1d.bias")
    _limit_positions(config)


def _configure_falcon_h1(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """The multipliers are in the weights."""
    if _has(file, "ssm_norm.weight") or "output.weight" not in file.tensors:
        raise ModelError(f"{file.path}: a falcon-h1 file with a norm in the mixers or tied embeddings is ambiguous")
    if any(_has(file, f"attn_{part}.bias") for part in ("q", "k", "v", "output")):
        raise ModelError(f"{file.path}: biases of a falcon-h1 file's attention are ambiguous")
    heads, head_dim, inner = _heads(file, own)
    config |= {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "projectors_bias": _has(file, "ssm_out.bias"),
    }


def _configure_granite(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    if own.get("rope.scaling.finetuned"):
        raise ModelError(f"{file.path}: a granitehybrid file with rotary embedding is Bamba's, and not supported")
    heads, head_dim, inner = _heads(file, own)
    config |= {
        "layer_types": [FULL if _at(file, layer, "attn_q.weight") else MAMBA for layer in _layers(file, config)],
        "num_key_value_heads": _kv_heads(own, config),
        "num_local_experts": own.get("expert_count", 0),
        "attention_bias": _has(file, "attn_q.bias"),
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_expand": _expansion(file, config, inner),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }
    _limit_positions(config)


def _configure_nemotron_h(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    if own.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(f"{file.path}: the expert gating function {brief(own['expert_gating_func'])} is not supported")
    if own.get("expert_group_count", 1) not in (0, 1):
        raise ModelError(
            f"{file.path}: {brief(own['expert_group_count'])} groups of experts: how many are used is not said"
        )
    heads, head_dim, _ = _heads(file, own)
    config |= {
        "layers_block_type": [_nemotron_h_layer(file, layer) for layer in _layers(file, config)],
        "num_key_value_heads": _kv_heads(own, config),
        "intermediate_size": _most(own, "feed_forward_length"),
        "layer_norm_epsilon": config.pop("rms_norm_eps", own.get("attention.layer_norm_epsilon")),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "use_bias": _has(file, "ssm_in.bias"),
        "mlp_bias": _has(file, "ffn_up.bias") or _has(file, "ffn_up_shexp.bias"),
    }
    _limit_positions(config)


def _nemotron_h_layer(file: GgufFile, layer: int) -> str:
    for sign, kind in (("ssm_in", MAMBA), ("attn_q", FULL), ("ffn_gate_inp", MOE)):
        if _at(file, layer, f"{sign}.weight"):
            return kind
    return MLP


def _configure_jamba(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    layers = _layers(file, config)
    config |= {
        "num_key_value_heads": _kv_heads(own, config),
        "mamba_expand": _expansion(file, config, own.get("ssm.inner_size")),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        **_period(file, "attn_layer", [layer for layer in layers if _at(file, layer, "attn_q.weight")], len(layers)),
        **_period(
            file, "expert_layer", [layer for layer in layers if _at(file, layer, "ffn_gate_inp.weight")], len(layers)
        ),
    }


def _period(file: GgufFile, name: str, found: list[int], num_layers: int) -> dict[str, int]:
    """The period and offset that give the layers `found`; one beyond the last layer gives none."""
    offset = found[0] if found else num_layers
    period = found[1] - offset if len(found) > 1 else num_layers + 1
    if found != list(range(offset, num_layers, period)) or offset >= period:
        raise ModelError(f"{file.path}: the layers {str(found)[:80]} are not every n-th one")
    return {f"{name}_offset": offset, f"{name}_period": period}


def _heads(file: GgufFile, own: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a Mamba-2 mixer: heads, their size, and channels. The format calls the heads the rank of the step widths."""
    heads, inner = own.get("ssm.time_step_rank"), own.get("ssm.inner_size")
    if type(heads) is not int or type(inner) is not int or heads < 1 or inner % heads:
        raise ModelError(f"{file.path}: {str(inner)[:40]} channels of a mixer for {str(heads)[:40]} heads")
    return heads, inner // heads, inner


def _expansion(file: GgufFile, config: Mapping[str, Any], inner: Any) -> int:
    hidden_size = config.get("hidden_size")
    if type(inner) is not int or type(hidden_size) is not int or hidden_size < 1 or inner % hidden_size:
        raise ModelError(
            f"{file.path}: {str(inner)[:40]} channels of a mixer, not a multiple of {str(hidden_size)[:40]}"
        )
    return inner // hidden_size


def _layers(file: GgufFile, config: Mapping[str, Any]) -> range:
    count = config.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= len(file.tensors):
        raise ModelError(f"{file.path}: {str(count)[:40]} blocks in a file of {len(file.tensors)} tensors")
    return range(count)


def _most(own: Mapping[str, Any], key: str) -> Any:
    """The most of a list, whose other entries are 0 for the layers without; or the one number for all."""
    value = own.get(key)
    if isinstance(value, list | np.ndarray) and all(isinstance(entry, int | np.integer) for entry in value):
        return max(map(int, value), default=0)
    return value


def _kv_heads(own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Without attention their number is in no file, and of no use."""
    return _most(own, "attention.head_count_kv") or config.get("num_attention_heads")


def _limit_positions(config: dict[str, Any]) -> None:
    if config.get("max_position_embeddings") == _NO_CONTEXT:
        config["max_position_embeddings"] = _POSITIONS


def _at(file: GgufFile, layer: int, name: str) -> bool:
    return f"blk.{layer}.{name}" in file.tensors


def _has(file: GgufFile, name: str) -> bool:
    return any(stored.endswith(f".{name}") for stored in file.tensors)


_GRANITE_SHARED: Final = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "output_linear"}
_NEMOTRON_H: Final = Architecture(
    model_type="nemotron_h",
    interleaved_rope=True,
    top_names=_BACKBONE,
    block_names={
        **_within("mixer", {**_MAMBA2, **_ATTENTION, "ffn_up": "up_proj", "ffn_down": "down_proj"}),
        "attn_norm": "norm",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b": "mixer.gate.e_score_correction",
        **_experts("mixer", {"ffn_up": "up_proj", "ffn_down": "down_proj"}),
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
        *_SSM_KEYS,
        "attention.head_count_kv",
        "attention.layer_norm_epsilon",
        "feed_forward_length",
        "expert_shared_count",
        "expert_group_count",
        "expert_gating_func",
    ),
    configure=_configure_nemotron_h,
    restore=restore_nemotron_h,
)

ARCHITECTURES: Final = {
    "mamba": Architecture(
        model_type="mamba",
        top_names=_BACKBONE,
        block_names={**_within("mixer", _MAMBA1), "attn_norm": "norm"},
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
        },
        checked=(*_SSM_KEYS, "ssm.dt_b_c_rms"),
        configure=_configure_mamba,
        restore=partial(with_backbone, restore_mamba1),
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        top_names=_BACKBONE,
        block_names={**_within("mixer", _MAMBA2), "attn_norm": "norm"},
        keys={"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups"},
        checked=_SSM_KEYS,
        configure=_configure_mamba2,
        restore=partial(with_backbone, restore_mamba2),
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        top_names=_FINAL_NORM,
        block_names={
            **_within("self_attn", _ATTENTION),
            **_within("mamba", _MAMBA2),
            **_within("feed_forward", _GATED),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
        },
        checked=_SSM_KEYS,
        configure=_configure_falcon_h1,
        restore=restore_falcon_h1,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        interleaved_rope=True,
        block_names={
            **_within("self_attn", _ATTENTION),
            **_within("mamba", _MAMBA2),
            **_within("shared_mlp", _GRANITE_SHARED),
            **_within("shared_mlp", {f"{stored}_shexp": name for stored, name in _GRANITE_SHARED.items()}),
            "ffn_gate_inp": "block_sparse_moe.router",
            **_experts("block_sparse_moe", _GATED),
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        checked=(*_SSM_KEYS, "attention.head_count_kv"),
        configure=_configure_granite,
        restore=restore_granite,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "jamba": Architecture(
        model_type="jamba",
        top_names=_FINAL_NORM,
        block_names={
            **_within("self_attn", _ATTENTION),
            **_within("mamba", _JAMBA),
            **_within("feed_forward", _GATED),
            "ffn_gate_inp": "feed_forward.router",
            **_experts("feed_forward", _GATED),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        checked=(*_SSM_KEYS, "attention.head_count_kv"),
        configure=_configure_jamba,
        restore=restore_mamba1,
    ),
}
