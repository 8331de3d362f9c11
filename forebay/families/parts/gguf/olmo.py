"""Names of norms behind attention and MLP."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, MLP

NAMES: Final = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
