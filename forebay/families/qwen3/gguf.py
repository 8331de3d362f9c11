from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture
from forebay.families.parts.gguf.qwen_pictures import PICTURES

ARCHITECTURES: Final = {
    "qwen3": Architecture(block_names=PRE_NORM),
    "qwen3vl": Architecture(block_names=PRE_NORM, checked=PICTURES),
}
