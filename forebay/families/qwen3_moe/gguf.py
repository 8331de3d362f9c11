from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.qwen_pictures import PICTURES


def _configure(header: Header) -> None:
    header.config["norm_topk_prob"] = True  # the format has no key for it: every file of this architecture has it


_NAMES: Final = {**PRE_NORM, **EXPERTS}

ARCHITECTURES: Final = {
    "qwen3moe": Architecture(block_names=_NAMES, configure=_configure),
    "qwen3vlmoe": Architecture(block_names=_NAMES, checked=PICTURES, configure=_configure),
}
