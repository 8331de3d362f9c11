"""Answers in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    """Return `value` as JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
