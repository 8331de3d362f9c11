from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture

ARCHITECTURES: Final = {"qwen2": Architecture(model_type="qwen2", block_names=PRE_NORM)}
