from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, YARN_KEYS, Architecture, Header


def _configure(header: Header) -> None:
    header.config["mlp_bias"] = header.has("ffn_up.bias")
    header.yarn_options()


ARCHITECTURES: Final = {
    "arcee": Architecture(interleaved_rope=True, block_names=PRE_NORM, checked=YARN_KEYS, configure=_configure)
}
