from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture, Header


def _configure(header: Header) -> None:
    config = header.config
    if "sliding_window" in config:
        config["model_type"] = "mistral"  # the format has one architecture for both
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))


ARCHITECTURES: Final = {
    "llama": Architecture(
        interleaved_rope=True,
        block_names=PRE_NORM,
        keys={"attention.sliding_window": "sliding_window"},
        configure=_configure,
    )
}
