from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.gated_delta import CHECKED, KEYS, configure, reorder, restore
from forebay.families.parts.gguf.shared_experts import EXPERT_NAMES

ARCHITECTURES: Final = {
    "qwen35moe": Architecture(
        block_names=EXPERT_NAMES,
        keys=KEYS,
        checked=CHECKED,
        configure=configure,
        reorder=reorder,
        restore=restore,
    ),
}
