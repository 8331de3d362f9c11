"""Lines of a log that are JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def as_line(fields: Mapping[str, Any]) -> str:
    """Return an object on one line, in ASCII: every device takes it, whatever its encoding is."""
    return json.dumps(fields, separators=(",", ":"))


def is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object."""
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def rfc3339(seconds: float) -> str:
    """Return a Unix time as `2026-11-29T01:02:03.456Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
