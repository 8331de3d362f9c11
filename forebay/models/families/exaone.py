from __future__ import annotations

from forebay.models.families.parts.plain import block

__all__ = ["block"]
