from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture

ARCHITECTURES: Final = {"exaone": Architecture(block_names=PRE_NORM)}
