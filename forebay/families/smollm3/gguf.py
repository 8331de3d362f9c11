from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture

ARCHITECTURES: Final = {"smollm3": Architecture(interleaved_rope=True, block_names=PRE_NORM)}
