from __future__ import annotations

from forebay.models.families.parts.scaled_windows import describe

__all__ = ["describe"]
