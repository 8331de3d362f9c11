"""The format has one architecture for Llama, Mistral and Mixtral. Left out: Mixtral's files of before 2024-04, which
have a tensor for each expert."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.mixtures import EXPERTS


def _configure(header: Header) -> None:
    config = header.config
    if config.get("num_experts"):
        config["model_type"] = "mixtral"
    elif "sliding_window" in config:
        config["model_type"] = "mistral"
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))


ARCHITECTURES: Final = {
    "llama": Architecture(
        interleaved_rope=True,
        block_names={**PRE_NORM, **EXPERTS},
        keys={"attention.sliding_window": "sliding_window"},
        configure=_configure,
    )
}
