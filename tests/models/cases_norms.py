"""Cases of models with LayerNorm, capped scores, or windows with heads of their own; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {}
