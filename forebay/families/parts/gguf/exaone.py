"""Names of EXAONE's layers."""

from __future__ import annotations

from forebay.families.base.architecture import Header


def configure(header: Header) -> None:
    """Complete the configuration with the layers that have a window; a file that names none has no such layer."""
    config = header.config
    config["sliding_window"] = config.get("sliding_window")  # a null, which is not an absence, for none
    if config["sliding_window"] is not None:
        config["layer_types"] = header.windowed()
