from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture, Header
from forebay.families.parts.gguf.convolution import NAMES, TOP, configure, restore


def _configure_dense(header: Header) -> None:
    configure(header)
    header.config["block_auto_adjust_ff_dim"] = False


ARCHITECTURES: Final = {
    "lfm2": Architecture(
        block_names=NAMES,
        top_names=TOP,
        keys={"shortconv.l_cache": "conv_L_cache"},
        checked=("attention.head_count_kv",),
        configure=_configure_dense,
        restore=restore,
    ),
}
