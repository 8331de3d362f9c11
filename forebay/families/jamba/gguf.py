from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import (
    FINAL_NORM,
    GATED,
    PROJECTIONS,
    Architecture,
    Header,
    expert_names,
    within,
)
from forebay.families.parts.gguf.mamba import MAMBA1, SSM_KEYS, restore_mamba1
from forebay.families.parts.gguf.mamba2 import expansion

_NAMES: Final = {**MAMBA1, "ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm", "ssm_c_norm": "c_layernorm"}


def _configure(header: Header) -> None:
    header.config.update(
        num_key_value_heads=header.kv_heads(),
        mamba_expand=expansion(header, header.own.get("ssm.inner_size")),
        mamba_conv_bias=header.has("ssm_conv1d.bias"),
        mamba_proj_bias=header.has("ssm_in.bias"),
        **_period(header, "attn_layer", "attn_q"),
        **_period(header, "expert_layer", "ffn_gate_inp"),
    )


def _period(header: Header, name: str, sign: str) -> dict[str, int]:
    """The period and offset that give the layers with a weight `sign`; one beyond the last layer gives none."""
    kinds = header.kinds({sign: name}, "")
    found, num_layers = [layer for layer, kind in enumerate(kinds) if kind], len(kinds)
    offset = found[0] if found else num_layers
    period = found[1] - offset if len(found) > 1 else num_layers + 1
    if found != list(range(offset, num_layers, period)) or offset >= period:
        raise header.wrong(f"the layers {str(found)[:80]} are not every n-th one")
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
