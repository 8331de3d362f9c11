"""Files name no window, and llama.cpp lets every token see all before it."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PROJECTIONS, Architecture, Header, within

_NAMES: Final = {
    **within("self_attn", PROJECTIONS),
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _configure(header: Header) -> None:
    header.config.update(use_bias=header.has("attn_q.bias"), sliding_window=None)


ARCHITECTURES: Final = {
    "starcoder2": Architecture(
        block_names=_NAMES, keys={"attention.layer_norm_epsilon": "norm_epsilon"}, configure=_configure
    ),
}
