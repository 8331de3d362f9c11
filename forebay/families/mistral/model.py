from __future__ import annotations

from forebay.families.llama.model import describe

__all__ = ["describe"]
