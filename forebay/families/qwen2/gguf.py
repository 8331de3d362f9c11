from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture

# The sections are of M-RoPE, whose three positions are equal for text.
ARCHITECTURES: Final = {
    "qwen2": Architecture(block_names=PRE_NORM),
    "qwen2vl": Architecture(block_names=PRE_NORM, checked=("rope.dimension_sections",)),
}
