"""Rotary embeddings by the kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Ropes = Mapping[str, tuple[float, dict[str, Any] | None]]
"""Base and scaling for each kind of attention."""
