from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import YARN_KEYS, Architecture, Header
from forebay.families.config.transformer import FULL, SLIDING
from forebay.families.parts.gguf.olmo import NAMES


def _configure(header: Header) -> None:
    """With a window the file is OLMo 3's, which has the same architecture; rope scaling is that of full attention."""
    config = header.config
    header.yarn_options()
    if "sliding_window" in config:
        theta = config.get("rope_theta")
        thetas = {FULL: theta, SLIDING: header.own.get("rope.freq_base_swa", theta)}
        config |= {
            "model_type": "olmo3",
            "layer_types": header.windowed(),
            "rope_parameters": {kind: {"rope_theta": theta} for kind, theta in thetas.items()},
        }


ARCHITECTURES: Final = {
    "olmo2": Architecture(
        block_names=NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("attention.sliding_window_pattern", "rope.freq_base_swa", *YARN_KEYS),
        configure=_configure,
    )
}
