from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture

# What pictures need beside the text: M-RoPE's sections, and the layers that are given more than embeddings of them.
PICTURES: Final = ("rope.dimension_sections", "n_deepstack_layers")

ARCHITECTURES: Final = {
    "qwen3": Architecture(block_names=PRE_NORM),
    "qwen3vl": Architecture(block_names=PRE_NORM, checked=PICTURES),
}
