"""Keys of Qwen 3's images."""

from __future__ import annotations

from typing import Final

# What pictures need beside the text: M-RoPE's sections, and the layers that are given more than embeddings of them.
PICTURES: Final = ("rope.dimension_sections", "n_deepstack_layers")
