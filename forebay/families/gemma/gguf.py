from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture
from forebay.families.parts.gguf.gemma import restore_norms

ARCHITECTURES: Final = {"gemma": Architecture(block_names=PRE_NORM, restore=restore_norms)}
