from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture, Header
from forebay.families.base.gguf_names import LONG_ROPE_AMPLITUDE
from forebay.families.parts.gguf.joined_mlp import JOINED_MLP
from forebay.families.parts.gguf.partial_rotary import configure


def _configure(header: Header) -> None:
    configure(header)
    header.config["sliding_window"] = header.config.get("sliding_window") or None  # 0 for none


ARCHITECTURES: Final = {
    "phi3": Architecture(
        block_names={
            **JOINED_MLP,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        keys={"attention.sliding_window": "sliding_window"},
        checked=("rope.dimension_count", LONG_ROPE_AMPLITUDE),
        configure=_configure,
    )
}
