"""The router's routes: those of a server, each forwarded as its declaration says, and those about members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp

from forebay.http.errors import RESPONSES
from forebay.http.route import Forward, Handler, Route
from forebay.http.security import AccessRules, Cluster, Security
from forebay.http.tracing import traced
from forebay.route import information
from forebay.route.administration import MEMBER_ROUTES, administer
from forebay.route.generation import abort_request, generate, pooled
from forebay.route.information import forward
from forebay.route.router import Router
from forebay.server.app import ROUTES as SERVER_ROUTES
from forebay.server.assets import Endpoint, application, file_endpoint, with_cors
from forebay.server.console import load_assets
from forebay.server.gateway import Gateway

_FORWARDERS: Final[Mapping[Forward, Handler[Router]]] = {
    Forward.PAIR: generate,
    Forward.PROMPT: pooled,
    Forward.ANY: forward,
}
_OWN: Final[Mapping[str, Handler[Router]]] = {
    "/abort_request": abort_request,
    f"{RESPONSES}/{{response_id}}": information.stored,  # a server of one role says that it stores none
    f"{RESPONSES}/{{response_id}}/input_items": information.stored,
    f"{RESPONSES}/{{response_id}}/cancel": information.stored,
    "/v1/models": information.models,
    "/v1/models/{model_id:path}": information.model,
    "/health": information.health,
    "/ready": information.ready,
    "/metrics": information.metrics,
    "/server_info": information.server_info,
    "/debug/state": information.debug_state,
    "/debug/explain/{request_id}": information.stored,
}


def _handler(route: Route[Any]) -> Handler[Router]:
    """Return the handler of a server's route in the router. Raises KeyError for an own one that is missing."""
    if route.forward is Forward.OWN:
        return _OWN[route.path]
    if route.forward is Forward.ALL:
        return partial(administer, has_body=route.body is not None, empties_cache=route.empties_cache)
    return _FORWARDERS[route.forward]


def _forwarded(routes: Iterable[Route[Any]]) -> Iterator[Route[Router]]:
    for route in routes:
        if route.forward is not Forward.NONE:
            yield replace(route, handler=_handler(route))


ROUTES: Final[tuple[Route[Router], ...]] = (*_forwarded(SERVER_ROUTES), *MEMBER_ROUTES)


def create_app(router: Router) -> ASGIApp:
    """The ASGI application; run it with `http.listen`."""
    assets = load_assets()
    files = [Path(path, file_endpoint(asset), methods=["GET"]) for path, asset in assets.items()]

    def endpoint_of(handler: Handler[Router]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await handler(request, router)

        return endpoint

    app = application(ROUTES, endpoint_of, files)
    access = AccessRules(ROUTES, files=assets)
    gateway = Gateway(app, Security(router.config), Cluster(router.config), router.metrics, access)
    return with_cors(traced(gateway, router.tracer), router.config)
