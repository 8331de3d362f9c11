"""Parts that our applications share: the page's files, one place where errors become answers, and whose pages may
ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from forebay.config.config import ServerConfig
from forebay.server.console import HEADERS, Asset


def file_endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that serves `asset`, or 304 to a client that has it already."""

    async def endpoint(request: Request) -> Response:
        headers = {**HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    return endpoint


async def pass_on(request: Request, error: Exception) -> Response:
    """To the gateway, which makes an answer of it."""
    raise error


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """For pages of other origins, where those are allowed."""
    if not config.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(config.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["anthropic-version", "authorization", "content-type", "x-api-key", "x-request-id"],
        expose_headers=["x-request-id", "x-forebay-ignored", "x-forebay-server", "x-forebay-route"],
    )
