from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.architecture import PROJECTIONS, Architecture, whole, within
from forebay.formats.gguf import GgufFile

JOINED_MLP: Final = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}

_NAMES: Final = {
    **within("self_attn", PROJECTIONS),
    **JOINED_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """The share of a head's dimensions that is rotated, which is rounded down to their number again."""
    if "attention.key_length" in own:
        size = whole(file, own, "attention.key_length")
    else:
        size = whole(file, own, "embedding_length") // whole(file, own, "attention.head_count")
    rotated = whole(file, own, "rope.dimension_count")
    if rotated > size:
        raise ModelError(f"{file.path}: {rotated} rotated dimensions of {size} of a head")
    config |= {"head_dim": size, "partial_rotary_factor": min(1.0, (rotated + 0.5) / size)}


ARCHITECTURES: Final = {
    "glm4": Architecture(block_names=_NAMES, checked=("rope.dimension_count",), configure=configure)
}
