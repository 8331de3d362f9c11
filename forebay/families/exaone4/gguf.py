from __future__ import annotations

from typing import Final

from forebay.families.architecture import Architecture, Header
from forebay.families.olmo2.gguf import NAMES


def configure(header: Header) -> None:
    """Complete the configuration with the layers that have a window; a file that names none has no such layer."""
    config = header.config
    config["sliding_window"] = config.get("sliding_window")  # a null, which is not an absence, for none
    if config["sliding_window"] is not None:
        config["layer_types"] = header.windowed()


ARCHITECTURES: Final = {
    "exaone4": Architecture(
        block_names=NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("attention.sliding_window_pattern",),
        configure=configure,
    )
}
