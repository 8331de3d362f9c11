from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.gated_delta import CHECKED, KEYS, NAMES, configure, reorder, restore

ARCHITECTURES: Final = {
    "qwen35": Architecture(
        block_names=NAMES,
        keys=KEYS,
        checked=CHECKED,
        configure=configure,
        reorder=reorder,
        restore=restore,
    ),
}
