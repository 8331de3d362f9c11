"""/abort_request: clients end requests of their own, by the ids that they know."""

from __future__ import annotations

from typing import Final, Literal, Self

import msgspec
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from forebay.http.route import Access, Forward, Route
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.strict import Label, Strict
from forebay.server.protocol.validation import MISSING_FIELD, refusal


class Aborted(msgspec.Struct, kw_only=True):
    """The answer of /abort_request: how many requests were ended."""

    success: Literal[True]
    aborted: int


class AbortRequest(Strict):
    """`rid` is what a request was sent with, or the id of its answer; `abort_all` means all of the sender's."""

    rid: Label | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        if not (self.abort_all or self.rid):
            raise refusal(MISSING_FIELD, "rid", "rid is missing: it says which request is to end")
        return self


async def abort_request(request: Request, server: ServerContext) -> Response:
    """200, and how many there were."""
    body = await read_body(request, server, AbortRequest)
    tenant = RequestContext.of(request.scope).tenant
    num_aborted = server.under_way.abort(tenant, None if body.abort_all else body.rid)
    return Response(msgspec.json.encode(Aborted(success=True, aborted=num_aborted)), media_type="application/json")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/abort_request",
        abort_request,
        body=AbortRequest,
        answer=Aborted,
        text="End requests of one's own that run or wait.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
)
