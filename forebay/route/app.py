"""The router's routes: those of a server, each asked of the members that know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forebay.base.errors import ForebayError
from forebay.route.administration import ADMIN_ROUTES, MEMBER_ROUTES
from forebay.route.generation import abort_request, generate, pooled
from forebay.route.information import debug_state, forward, health, metrics, model, models, ready, server_info, stored
from forebay.route.router import Router
from forebay.server.assets import file_endpoint, pass_on, with_cors
from forebay.server.console import load_assets
from forebay.server.gateway import Gateway
from forebay.server.http.errors import MESSAGES, RESPONSES
from forebay.server.http.security import Cluster, Security

Handler = Callable[[Request, Router], Awaitable[Response]]

ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("POST", "/v1/chat/completions", generate),
    ("POST", "/v1/completions", generate),
    ("POST", "/generate", generate),
    ("POST", "/completion", generate),
    ("POST", "/apply-template", forward),
    ("POST", "/api/chat", generate),
    ("POST", "/api/generate", generate),
    ("POST", "/api/embed", pooled),
    ("POST", "/api/show", forward),
    ("GET", "/api/tags", forward),
    ("GET", "/api/version", forward),
    ("POST", "/abort_request", abort_request),
    ("POST", MESSAGES, generate),
    ("POST", f"{MESSAGES}/count_tokens", forward),
    ("POST", RESPONSES, generate),
    ("POST", f"{RESPONSES}/input_tokens", forward),
    ("GET", f"{RESPONSES}/{{response_id}}", stored),  # a server of one role says that it stores none
    ("DELETE", f"{RESPONSES}/{{response_id}}", stored),
    ("POST", "/v1/embeddings", pooled),
    ("POST", "/v1/score", pooled),
    ("POST", "/v1/rerank", pooled),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model_id:path}", model),
    ("POST", "/tokenize", forward),
    ("GET", "/tokenizer_info", forward),
    ("POST", "/detokenize", forward),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/server_info", server_info),
    ("GET", "/model_info", forward),
    ("GET", "/props", forward),
    ("GET", "/slots", forward),
    ("GET", "/debug/state", debug_state),
    *ADMIN_ROUTES,
    *MEMBER_ROUTES,
)


def create_app(router: Router) -> ASGIApp:
    """The ASGI application; run it with `server.http.listen`."""
    assets = load_assets()
    routes = [Route(path, _endpoint(handler, router), methods=[method]) for method, path, handler in ROUTES]
    routes += [Route(path, file_endpoint(asset), methods=["GET"]) for path, asset in assets.items()]
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((ForebayError, 404, 405, Exception), pass_on))
    app.router.redirect_slashes = False
    paths = [path for _, path, _ in ROUTES]
    security, cluster = Security(router.config), Cluster(router.config)
    trusted = {path for _, path, _ in MEMBER_ROUTES}
    gateway = Gateway(app, security, cluster, router.metrics, paths=paths, public_paths=assets, trusted_paths=trusted)
    return with_cors(gateway, router.config)


def _endpoint(handler: Handler, router: Router) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, router)

    return endpoint
