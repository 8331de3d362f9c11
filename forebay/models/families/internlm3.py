from __future__ import annotations

from forebay.models.families.llama import block

__all__ = ["block"]
