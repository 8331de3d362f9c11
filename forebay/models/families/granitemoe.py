from __future__ import annotations

from forebay.models.families.parts.multipliers import describe

__all__ = ["describe"]
