from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.families.architecture import EXPERTS, PRE_NORM, Architecture
from forebay.formats.gguf import GgufFile


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    config["norm_topk_prob"] = True  # the format has no key for it: every file of this architecture has it


ARCHITECTURES: Final = {"qwen3moe": Architecture(block_names={**PRE_NORM, **EXPERTS}, configure=_configure)}
