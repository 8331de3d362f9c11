"""The routes: their bodies and answers, as the server itself shows them at /docs, and their declared access."""

from __future__ import annotations

from forebay.http.route import Access, Forward
from forebay.route.app import ROUTES as ROUTER_ROUTES
from forebay.server.app import ROUTES, described
from forebay.server.openapi.page import markdown
from scripts.site.tables import codes, table


def page() -> str:
    return markdown(described())


def access() -> str:
    """Return the table of routes by the key that they need, those of a router included."""
    routes = [*ROUTES, *ROUTER_ROUTES]
    found = {rule: dict.fromkeys(route.template for route in routes if route.access is rule) for rule in Access}
    return table(("key", "routes"), [(rule.value, codes(paths)) for rule, paths in found.items() if paths])


def forwarding() -> str:
    """Return the table of a server's routes by the servers that a router asks."""
    found = {to: dict.fromkeys(route.template for route in ROUTES if route.forward is to) for to in Forward}
    return table(("sent to", "routes"), [(to.value, codes(paths)) for to, paths in found.items() if paths])
