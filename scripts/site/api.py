"""The routes and the types of their bodies and answers, as the server itself shows them at /docs."""

from __future__ import annotations

from forebay.server.app import described
from forebay.server.openapi.page import markdown


def page() -> str:
    return markdown(described())
