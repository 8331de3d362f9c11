"""Parts that our applications share: routes, the files of the site, and the origins whose pages may send requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp

from forebay.base.errors import ForebayError
from forebay.config.config import ServerConfig
from forebay.http.route import Handler, Route, State
from forebay.server.console import HEADERS, Asset

Endpoint = Callable[[Request], Awaitable[Response]]


def file_endpoint(asset: Asset) -> Endpoint:
    """Return a route that serves `asset`, or 304 to a client that has it already."""

    async def endpoint(request: Request) -> Response:
        headers = {**HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.body, media_type=asset.media_type, headers=headers)

    return endpoint


def application(
    routes: Iterable[Route[State]], endpoint_of: Callable[[Handler[State]], Endpoint], files: Iterable[Path]
) -> Starlette:
    """Return the application of these routes and files. Errors are raised to the gateway, which answers them."""
    paths = [Path(route.path, endpoint_of(route.handler), methods=[route.method]) for route in routes]
    app = Starlette(
        routes=[*paths, *files], exception_handlers=dict.fromkeys((ForebayError, 404, 405, Exception), _raise)
    )
    app.router.redirect_slashes = False
    return app


async def _raise(request: Request, error: Exception) -> Response:
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
        expose_headers=[
            "x-request-id",
            "x-forebay-cache",
            "x-forebay-ignored",
            "x-forebay-server",
            "x-forebay-route",
        ],
    )
