"""Cases of models with experts; see `CASES` in tiny.py."""

from __future__ import annotations

from typing import Any

CASES: dict[str, tuple[str, dict[str, Any]]] = {}
