from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header


def _configure(header: Header) -> None:
    header.config["use_bias"] = header.config["attention_bias"]


ARCHITECTURES: Final = {"ernie4_5": Architecture(block_names=PRE_NORM, configure=_configure)}
