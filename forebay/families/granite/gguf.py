"""Granite 3, and Granite 4 without mixers, whose files have metadata of mixers and experts all the same."""

from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture, Header
from forebay.families.granitemoehybrid.gguf import SCALES
from forebay.families.mamba.gguf import SSM_KEYS


def attention_alone(header: Header) -> None:
    """Complete the configuration of a model without mixers. Raises ModelError for one without rotary embedding."""
    if header.own.get("rope.scaling.finetuned", True) is not True:
        raise header.wrong("a file of attention without rotary embedding is not supported")
    header.config["num_key_value_heads"] = header.kv_heads()


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
