from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.architecture import (
    FINAL_NORM,
    GATED,
    PROJECTIONS,
    Architecture,
    at,
    expert_names,
    has,
    kv_heads,
    layer_range,
    within,
)
from forebay.families.mamba.gguf import MAMBA1, SSM_KEYS, restore_mamba1
from forebay.families.mamba2.gguf import expansion
from forebay.formats.gguf import GgufFile

_NAMES: Final = {**MAMBA1, "ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm", "ssm_c_norm": "c_layernorm"}


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    layers = layer_range(file, config)
    config |= {
        "num_key_value_heads": kv_heads(own, config),
        "mamba_expand": expansion(file, config, own.get("ssm.inner_size")),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
        **_period(file, "attn_layer", [layer for layer in layers if at(file, layer, "attn_q.weight")], len(layers)),
        **_period(
            file, "expert_layer", [layer for layer in layers if at(file, layer, "ffn_gate_inp.weight")], len(layers)
        ),
    }


def _period(file: GgufFile, name: str, found: list[int], num_layers: int) -> dict[str, int]:
    """The period and offset that give the layers `found`; one beyond the last layer gives none."""
    offset = found[0] if found else num_layers
    period = found[1] - offset if len(found) > 1 else num_layers + 1
    if found != list(range(offset, num_layers, period)) or offset >= period:
        raise ModelError(f"{file.path}: the layers {str(found)[:80]} are not every n-th one")
    return {f"{name}_offset": offset, f"{name}_period": period}


ARCHITECTURES: Final = {
    "jamba": Architecture(
        top_names=FINAL_NORM,
        block_names={
            **within("self_attn", PROJECTIONS),
            **within("mamba", _NAMES),
            **within("feed_forward", GATED),
            "ffn_gate_inp": "feed_forward.router",
            **expert_names("feed_forward", GATED),
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm",
        },
        keys={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        checked=(*SSM_KEYS, "attention.head_count_kv"),
        configure=_configure,
        restore=restore_mamba1,
    ),
}
