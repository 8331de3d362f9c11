from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PROJECTIONS, Architecture, within
from forebay.families.parts.gguf.joined_mlp import JOINED_MLP
from forebay.families.parts.gguf.partial_rotary import configure

_NAMES: Final = {
    **within("self_attn", PROJECTIONS),
    **JOINED_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


ARCHITECTURES: Final = {
    "glm4": Architecture(block_names=_NAMES, checked=("rope.dimension_count",), configure=configure)
}
