from __future__ import annotations

from forebay.models.families.parts.norms_behind import block

__all__ = ["block"]
