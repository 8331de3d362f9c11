"""Granite 3, and Granite 4 without mixers, whose files have metadata of mixers and experts all the same."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.joined_experts import SCALES
from forebay.families.parts.gguf.mamba import SSM_KEYS
from forebay.families.parts.gguf.multipliers import attention_alone


def _configure(header: Header) -> None:
    attention_alone(header)
    if header.config.pop("num_experts", 0):
        raise header.wrong("there are experts in a granite file, which has none")
    header.config.pop("num_experts_per_tok", None)


ARCHITECTURES: Final = {
    "granite": Architecture(
        interleaved_rope=True,
        block_names=PRE_NORM,
        keys=SCALES,
        checked=(*SSM_KEYS, "attention.head_count_kv", "expert_shared_feed_forward_length"),
        configure=_configure,
    ),
}
