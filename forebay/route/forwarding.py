"""Parts of the router's routes: what of a request reaches a member, and what of a member's answer the client."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import Unavailable
from forebay.route.hops import VIA, hops
from forebay.route.members import Member
from forebay.route.selection import Selected
from forebay.route.upstream import MEMBER_LOST, Head
from forebay.server.context import RequestContext

ASK_TIMEOUT_S: Final = 30.0
_PASSED_ON: Final = ("authorization", "content-encoding", "content-type", "traceparent", "tracestate", "x-api-key")
_PASSED_BACK: Final = ("content-type", "cache-control", "retry-after", "x-forebay-cache", "x-forebay-ignored")
SERVER_HEADER: Final = b"x-forebay-server"
REASON_HEADER: Final = b"x-forebay-route"


def path_of(request: Request) -> str:
    """As the client wrote it, which is one word of a request's first line; decoded it could be several."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def passed_on(request: Request, router_id: str) -> dict[str, str]:
    """Return the headers by which members know clients, read bodies and find loops. No other header of a client reaches
    a member. Raises HttpError 508 for a request that has passed this router before."""
    kept = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    context = RequestContext.of(request.scope)
    return {**kept, "x-request-id": context.request_id, VIA: hops(request.headers, router_id)}


def passed_back(head: Head) -> dict[str, str]:
    """Return the headers of a member's answer that the client gets."""
    return {name: head.headers[name] for name in _PASSED_BACK if name in head.headers}


def name_servers(context: RequestContext, selected: Selected[Member]) -> None:
    """Name the servers of a request, and why they were selected, in headers of the answer, whatever it will be."""
    others = [header for header in context.headers if header[0] not in (SERVER_HEADER, REASON_HEADER)]
    servers = ", ".join(member.url for member in selected.members)
    context.headers[:] = [
        *others,
        (SERVER_HEADER, servers.encode("latin-1", "replace")),
        (REASON_HEADER, selected.reason.encode()),
    ]


async def ask(
    request: Request, router_id: str, member: Member, content: bytes | None = None, timeout_s: float | None = None
) -> tuple[Head, bytes]:
    """Return the answer of a member to the client's request. Raises Unavailable if there is none in time."""
    headers = passed_on(request, router_id)
    limit_s = ASK_TIMEOUT_S if timeout_s is None else timeout_s
    query = request.scope["query_string"].decode("latin-1")
    path = f"{path_of(request)}?{query}" if query else path_of(request)
    asked = member.pool.ask(request.method, path, headers, content)
    try:
        return await asyncio.wait_for(asked, limit_s)
    except TimeoutError:
        raise Unavailable(f"{member.url} has not answered within {limit_s:g} s", code=MEMBER_LOST) from None


def answered(answer: tuple[Head, bytes]) -> Response:
    """Return a member's answer as the client's."""
    head, body = answer
    return Response(body, status_code=head.status, headers=passed_back(head))
