from __future__ import annotations

from typing import Final

from forebay.families.architecture import EXPERTS, PRE_NORM, Architecture, Header


def _configure(header: Header) -> None:
    header.config["norm_topk_prob"] = True  # the format has no key for it: every file of this architecture has it


ARCHITECTURES: Final = {"qwen3moe": Architecture(block_names={**PRE_NORM, **EXPERTS}, configure=_configure)}
