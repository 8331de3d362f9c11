"""Loops of routers: the header that names the routers which a request has passed, and members that lead back.

Each router has an id. A request that reaches a router for the second time is refused there, and the router before
sends it to another member. A router's /server_info has the ids on its shortest way to a server (a path vector). A
member whose way leads through the router that checks it is not used, so that no router is ready because of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from starlette.datastructures import Headers

from forebay.http.errors import HttpError

VIA: Final = "x-forebay-via"  # ids, in the order in which the routers were passed
MOST_HOPS: Final = 8
PATH: Final = "router_path"  # a field of /server_info
LOOP_STATUS: Final = 508
LOOP: Final = "routing_loop"
_ID: Final = re.compile(r"[0-9a-f]{32}")


def hops(headers: Headers, router_id: str) -> str:
    """Return the value of `VIA` for the members of this router. Raises HttpError 508 for a request that was here, or
    that has passed too many routers, and 400 for a header that no router writes."""
    passed = [word.strip() for value in headers.getlist(VIA) for word in value.split(",")]
    if not all(map(_ID.fullmatch, passed)):
        raise HttpError(400, f"the header {VIA} is for routers: leave it out", code="invalid_header")
    if router_id in passed:
        raise HttpError(
            508,
            f"the request has passed this router before, and {len(passed)} routers in all: routers must not name each "
            "other, or themselves, as servers",
            code=LOOP,
        )
    if len(passed) >= MOST_HOPS:
        raise HttpError(508, f"the request has passed {len(passed)} routers, the limit", code=LOOP)
    return ", ".join([*passed, router_id])


def path_of_info(info: Mapping[str, Any]) -> list[str]:
    """Return the routers on the shortest way to a server that a member's /server_info names: none for a server."""
    named = info.get(PATH)
    found = named if isinstance(named, list) else []
    return [each for each in found if isinstance(each, str) and _ID.fullmatch(each)]


def shortest_path(router_id: str, infos: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the routers on the shortest way from this one to a server, given the infos of its usable members."""
    return [router_id, *min(map(path_of_info, infos), key=len, default=[])]


def loop_of(router_id: str, info: Mapping[str, Any]) -> str:
    """Return why a member is of no use to this router, or ""."""
    path = path_of_info(info)
    if path[:1] == [router_id]:
        return "it is this router itself"
    if router_id in path:
        return "it is a router that sends requests to this one"
    if len(path) >= MOST_HOPS:
        return f"{len(path)} routers are between it and a server, and {MOST_HOPS - 1} may be"
    return ""
