from __future__ import annotations

from forebay.families.llama.model import block

__all__ = ["block"]
