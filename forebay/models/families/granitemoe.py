from __future__ import annotations

from forebay.models.families.granite import describe

__all__ = ["describe"]
