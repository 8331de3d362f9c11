from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.families.architecture import PRE_NORM, Architecture
from forebay.formats.gguf import GgufFile


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
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
