"""Files omit which layers have a window: llama.cpp takes three of four, as transformers does."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.parallel import COHERE_KEYS, COHERE_NAMES

ARCHITECTURES: Final = {
    "cohere2": Architecture(
        block_names=COHERE_NAMES,
        keys={**COHERE_KEYS, "attention.sliding_window": "sliding_window"},
    ),
}
