from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Header


def _configure(header: Header) -> None:
    header.config["norm_topk_prob"] = False  # the format has no key for it, and llama.cpp takes the weights as they are


ARCHITECTURES: Final = {"olmoe": Architecture(block_names={**PRE_NORM, **EXPERTS}, configure=_configure)}
