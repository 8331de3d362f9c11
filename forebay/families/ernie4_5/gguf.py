from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.families.architecture import PRE_NORM, Architecture
from forebay.formats.gguf import GgufFile


def _configure(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    config["use_bias"] = config["attention_bias"]


ARCHITECTURES: Final = {"ernie4_5": Architecture(block_names=PRE_NORM, configure=_configure)}
