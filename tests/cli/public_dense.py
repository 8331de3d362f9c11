"""Published configurations of dense models, as facts; see `test_published_counts.py`."""

from __future__ import annotations

from typing import Any, Final

PUBLISHED: Final[dict[str, tuple[dict[str, Any], float]]] = {}
"""Repositories: fields, and the published number of parameters in billions."""
