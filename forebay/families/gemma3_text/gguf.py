"""Names of Gemma 3 in GGUF. Files omit the rotary base of windows and the scale of scores, which llama.cpp assumes."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.gemma import GEMMA_NAMES, restore_norms, set_scalar

_27B_LAYERS: Final = 62

ARCHITECTURES: Final = {
    "gemma3": Architecture(
        block_names=GEMMA_NAMES,
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        configure=lambda header: set_scalar(header, largest=_27B_LAYERS),
        restore=restore_norms,
    ),
}
