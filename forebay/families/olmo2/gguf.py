from __future__ import annotations

from typing import Final

from forebay.families.architecture import ATTENTION, MLP, Architecture

_NAMES: Final = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

ARCHITECTURES: Final = {"olmo2": Architecture(block_names=_NAMES)}
