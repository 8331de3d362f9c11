"""The routes that change members: announcements, and administration of all servers at once."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.http.answers import json_response
from forebay.http.errors import error_json
from forebay.http.route import Access, Forward, Route
from forebay.route.announcement import LEASE_S, MEMBERS_PATH, Accepted, Announcement
from forebay.route.forwarding import ask
from forebay.route.hops import LOOP_STATUS, hops
from forebay.route.members import Member, as_object
from forebay.route.router import Router
from forebay.route.standby import PREFIXES_PATH, Batch, Received
from forebay.server.context import RequestContext

ADMIN_TIMEOUT_S: Final = 600.0  # an update of weights reads all of them; servers have limits of their own

Body = TypeVar("Body", bound=msgspec.Struct)

log = get_logger("route")


async def announce(request: Request, router: Router) -> Response:
    """Take an announcement of a server. The gateway has checked that its sender has the cluster key."""
    context = RequestContext.of(request.scope)
    async with router.bodies.content(request.scope, context.client) as content:
        announcement = _decoded(content, Announcement)
    if member := router.members.announce(announcement, router.members.now):
        router.spawn(router.members.health.check_now(member))
    return json_response(Accepted(lease_s=LEASE_S, members=len(router.members.all)))


async def list_members(request: Request, router: Router) -> Response:
    """List all members, with why each gets no requests, if so."""
    now = router.members.now
    return json_response({"members": [member.as_dict(now) for member in router.members.all]})


async def learn(request: Request, router: Router) -> Response:
    """Take changes of the active router's prefix table, for which this one is the standby. Raises HttpError 508 if the
    sender is this router itself."""
    hops(request.headers, router.id)
    context = RequestContext.of(request.scope)
    async with router.bodies.content(request.scope, context.client) as content:
        batch = _decoded(content, Batch)
    batch.apply(router.members.prefixes)
    return json_response(Received(router=router.id))


def _decoded(content: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no {kind.__name__}: {error}", code="invalid_json") from None


async def administer(request: Request, router: Router, *, has_body: bool, empties_cache: bool) -> Response:
    """Send a request to every member, and return what each answered. Its status is the highest of theirs.

    `has_body`: servers read a body. `empties_cache`: no prefix that a member has cached is of use afterwards.
    """
    if not has_body:
        return await _at_all(request, router, b"", empties_cache=empties_cache)
    context = RequestContext.of(request.scope)
    async with router.bodies.content(request.scope, context.client) as content:
        return await _at_all(request, router, content, empties_cache=empties_cache)


async def _at_all(request: Request, router: Router, content: bytes, *, empties_cache: bool) -> Response:
    members = router.members.all or [router.members.select_for_answer()]  # which raises
    answers = await asyncio.gather(*(_outcome(request, router.id, member, content) for member in members))
    answers = [answer for answer in answers if answer["status"] != LOOP_STATUS] or answers
    if empties_cache:
        for member in members:
            router.members.forget(member)
    await asyncio.gather(*map(router.members.health.check_now, members))  # weight versions may have changed
    status = max(answer["status"] for answer in answers)
    log.info(event("administered", path=request.scope["path"], members=len(members), status=status))
    body: dict[str, Any] = {"success": status < 400, "members": answers}
    failed = next((answer for answer in answers if answer["status"] == status >= 400), None)
    if failed is not None:
        error = failed["answer"].get("error", {})
        body["error"] = {**error, "message": f"{failed['url']}: {error.get('message', f'HTTP {status}')}"}
    return json_response(body, status)


async def _outcome(request: Request, router_id: str, member: Member, content: bytes) -> dict[str, Any]:
    """Return the status and the answer of a member; of one that does not answer, the error."""
    try:
        head, body = await ask(request, router_id, member, content, ADMIN_TIMEOUT_S)
        status, answer = head.status, as_object(body)
    except ForebayError as error:
        status, answer = error.status, as_object(error_json(error, request.scope["path"]))
    return {"url": member.url, "role": member.role, "status": status, "answer": answer}


MEMBER_ROUTES: Final[tuple[Route[Router], ...]] = (
    Route(
        "POST",
        MEMBERS_PATH,
        announce,
        answer=Accepted,
        text="Announce a server.",
        access=Access.CLUSTER,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        MEMBERS_PATH,
        list_members,
        answer=dict[str, Any],
        text="The members, and why each gets no requests.",
        access=Access.CLUSTER,
        forward=Forward.OWN,
    ),
    Route(
        "POST",
        PREFIXES_PATH,
        learn,
        answer=Received,
        text="Changes of the prefix table, for a standby.",
        access=Access.CLUSTER,
        forward=Forward.OWN,
    ),
)
