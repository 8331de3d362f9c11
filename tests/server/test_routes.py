"""A route is declared once. Its access is part of the declaration, and everything else derives from it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

import forebay.server
from forebay.http.route import Access, Forward, Route
from forebay.http.security import AccessRules
from forebay.route.app import ROUTES as ROUTER_ROUTES
from forebay.server.app import ROUTES
from scripts.site import api

PACKAGE = Path(forebay.server.__file__).parent


async def handler(request: Request, state: object) -> Response:
    return Response()


def route(method: Any, path: str, access: Access) -> Route[object]:
    return Route(method, path, handler, answer=str, text="One.", access=access, forward=Forward.ANY)


def test_route_without_access_does_not_start() -> None:
    with pytest.raises(TypeError, match="access"):
        Route("GET", "/counters", handler, answer=str, text="One.", forward=Forward.ANY)  # type: ignore[call-arg]


@pytest.mark.parametrize("access", [None, "USER", True])
def test_route_access_of_another_type_does_not_start(access: Any) -> None:
    with pytest.raises(TypeError, match=r"GET /counters has access=.*: give one of"):
        route("GET", "/counters", access)


def test_every_declared_route_is_served() -> None:
    declared: list[Route[Any]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search("^ROUTES: Final", path.read_text(), re.MULTILINE) and path.name != "app.py":
            name = ".".join(path.relative_to(PACKAGE.parent.parent).with_suffix("").parts)
            declared += import_module(name).ROUTES
    assert len(declared) == len(ROUTES) > 50
    assert {(each.method, each.path) for each in declared} == {(each.method, each.path) for each in ROUTES}


def test_routes_with_totals_of_all_tenants_are_declared_so() -> None:
    """A route that counts over all clients is for an admin key if prefix caches are kept apart (C29)."""
    of = {access: {each.path for each in ROUTES if each.access is access} for access in Access}
    assert of[Access.TOTALS] == {
        *("/metrics", "/slots", "/debug/state", "/debug/tree", "/debug/cache/what-if"),
    }
    assert of[Access.PROBE] == {"/health"}
    assert of[Access.MEMBER] == {"/ready", "/server_info"}
    assert of[Access.CLUSTER] == of[Access.FILE] == set()
    of_own_requests = {"/debug/explain/{request_id}"}
    assert {path for path in of[Access.USER] if path.startswith("/debug")} == of_own_requests


def test_every_route_of_another_access_than_users_needs_its_key_in_the_router_too() -> None:
    of_server = {(each.method, each.path): each.access for each in ROUTES}
    for each in ROUTER_ROUTES:
        assert each.access is of_server.get((each.method, each.path), Access.CLUSTER)
    known = {(each.method, each.path) for each in ROUTER_ROUTES}
    assert {(each.method, each.path) for each in ROUTES if each.forward is not Forward.NONE} <= known
    assert not {(each.method, each.path) for each in ROUTES if each.forward is Forward.NONE} & known


def test_access_rules_path_with_a_parameter_has_the_access_of_its_route() -> None:
    routes = [route("GET", "/tenants/{name}", Access.ADMIN), route("GET", "/files/{name:path}", Access.TOTALS)]
    rules = AccessRules(routes)
    assert rules.of("GET", "/tenants/alice") is Access.ADMIN
    assert rules.of("GET", "/files/a/b") is Access.TOTALS
    assert rules.of("GET", "/tenants/alice/x") is Access.USER
    assert rules.of("GET", "/tenants/") is Access.USER


def test_access_rules_path_that_a_pattern_matches_too_has_the_stricter_access() -> None:
    """Which of the two routes answers depends on their order: no order opens the stricter one."""
    routes = [route("GET", "/tenants/all", Access.USER), route("GET", "/tenants/{name}", Access.ADMIN)]
    for order in (routes, routes[::-1]):
        assert AccessRules(order).of("GET", "/tenants/all") is Access.ADMIN


def test_access_rules_method_that_no_route_has_needs_the_strictest_key_of_the_path() -> None:
    rules = AccessRules([route("POST", "/sleep", Access.ADMIN), route("GET", "/health", Access.PROBE)], files=["/docs"])
    assert rules.of("GET", "/sleep") is Access.ADMIN
    assert rules.of("GET", "/health") is Access.PROBE
    assert rules.of("POST", "/health") is Access.USER
    assert (rules.of("GET", "/docs"), rules.of("POST", "/docs")) == (Access.FILE, Access.USER)
    assert rules.of("GET", "/unknown") is Access.USER


@pytest.mark.parametrize("made", [api.access, api.forwarding])
def test_guide_tables_name_every_route(made: Any) -> None:
    assert {each.template for each in ROUTES if f"`{each.template}`" not in made()} == set()
