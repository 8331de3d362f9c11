from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.exaone import configure
from forebay.families.parts.gguf.olmo import NAMES

ARCHITECTURES: Final = {
    "exaone4": Architecture(
        block_names=NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("attention.sliding_window_pattern",),
        configure=configure,
    )
}
