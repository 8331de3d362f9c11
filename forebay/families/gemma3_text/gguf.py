"""Names of Gemma 3 and EmbeddingGemma in GGUF. Files omit the rotary base of windows and the scale of scores, which
llama.cpp assumes."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import TOP_NAMES, Architecture, Header
from forebay.families.base.embedding import GGUF_DENSE
from forebay.families.parts.gguf.gemma import GEMMA_NAMES, restore_norms, set_scalar

_27B_LAYERS: Final = 62

_KEYS: Final = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
}


def _embedding(header: Header) -> None:
    """Complete the configuration of an EmbeddingGemma, whose tokens see both sides."""
    set_scalar(header, largest=0)
    header.config["use_bidirectional_attention"] = True


ARCHITECTURES: Final = {
    "gemma-embedding": Architecture(
        causal=False,
        block_names=GEMMA_NAMES,
        top_names={**TOP_NAMES, **{name: f"{name}.linear" for name in GGUF_DENSE}},
        keys=_KEYS,
        checked=tuple(f"{name}_feat_{side}" for name in GGUF_DENSE for side in ("in", "out")),
        configure=_embedding,
        restore=restore_norms,
    ),
    "gemma3": Architecture(
        block_names=GEMMA_NAMES,
        keys=_KEYS,
        configure=lambda header: set_scalar(header, largest=_27B_LAYERS),
        restore=restore_norms,
    ),
}
