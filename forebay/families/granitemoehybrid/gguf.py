"""Left out: Bamba, which shares this architecture (the files do not say how its half-rotated heads are stored)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.architecture import (
    GATED,
    PROJECTIONS,
    Architecture,
    Tensors,
    at,
    expert_names,
    has,
    kv_heads,
    layer_range,
    within,
)
from forebay.families.mamba.gguf import SSM_KEYS, limit_positions
from forebay.families.mamba2.gguf import MAMBA2, expansion, heads_of, restore_mamba2
from forebay.families.transformer import FULL, LINEAR
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import one_below_the_other

_SHARED: Final = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "output_linear"}


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    if own.get("rope.scaling.finetuned"):
        raise ModelError(f"{file.path}: a granitehybrid file with rotary embedding is Bamba's, and not supported")
    heads, head_dim, inner = heads_of(file, own)
    config |= {
        "layer_types": [FULL if at(file, layer, "attn_q.weight") else LINEAR for layer in layer_range(file, config)],
        "num_key_value_heads": kv_heads(own, config),
        "num_local_experts": own.get("expert_count", 0),
        "attention_bias": has(file, "attn_q.bias"),
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_expand": expansion(file, config, inner),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }
    limit_positions(config)


def _restore(tensors: Tensors) -> Tensors:
    """Gate and up of the shared MLP are one tensor."""
    restored = restore_mamba2(tensors)
    for name in [name for name in restored if name.endswith(".shared_mlp.gate.weight")]:
        gate, up = restored.pop(name), restored.pop(name.replace(".gate.", ".up."), None)
        if up is None or up.shape != gate.shape:
            raise ModelError(f"{name}: there is no up of the same shape")
        restored[name.replace(".gate.", ".input_linear.")] = one_below_the_other(gate, up)
    return restored


ARCHITECTURES: Final = {
    "granitehybrid": Architecture(
        interleaved_rope=True,
        block_names={
            **within("self_attn", PROJECTIONS),
            **within("mamba", MAMBA2),
            **within("shared_mlp", _SHARED),
            **within("shared_mlp", {f"{stored}_shexp": name for stored, name in _SHARED.items()}),
            "ffn_gate_inp": "block_sparse_moe.router",
            **expert_names("block_sparse_moe", GATED),
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
        checked=(*SSM_KEYS, "attention.head_count_kv"),
        configure=_configure,
        restore=_restore,
    ),
}
