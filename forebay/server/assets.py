"""What every application of ours has: the page's files, and one place where errors become answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from forebay.server.console import HEADERS, Asset


def file_endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        headers = {**HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    return endpoint


async def pass_on(request: Request, error: Exception) -> Response:
    """To the gateway, which makes an answer of it."""
    raise error
