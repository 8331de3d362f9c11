"""Names of Gemma 2 in GGUF. Files omit the scale of scores and which layers have a window: llama.cpp assumes them."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture
from forebay.families.parts.gguf.gemma import GEMMA_NAMES, restore_norms, set_scalar

_27B_LAYERS: Final = 46


ARCHITECTURES: Final = {
    "gemma2": Architecture(
        block_names=GEMMA_NAMES,
        keys={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        configure=lambda header: set_scalar(header, largest=_27B_LAYERS),
        restore=restore_norms,
    ),
}
