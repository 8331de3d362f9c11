"""The check of a KV transfer: /check_transfers."""

from __future__ import annotations

from typing import Any, Final, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from forebay.base.exposure import is_loopback
from forebay.base.log import event, get_logger
from forebay.config.engine_config import DisaggregationMode
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.api.core.rendezvous import check_named
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.administration import CheckTransfersRequest

log = get_logger("server")


class Checked(TypedDict):
    """The result by `transport`; `bytes_per_s` is 0 if too few bytes were moved to measure. `layout` is the same on
    both sides except for the page size, and `wrong` lists the columns whose content differs from the content that was
    sent."""

    num_bytes: int
    bytes_per_s: float
    transport: str
    layout: dict[str, Any]
    wrong: list[str]


async def check_transfers(request: Request, server: ServerContext) -> Response:
    """Test the transfers of a decode server: fetch a pattern through every column from a prefill server, into places of
    its own."""
    body = await read_body(request, server, CheckTransfersRequest)
    context = RequestContext.of(request.scope)
    decodes = server.model.mode is DisaggregationMode.DECODE
    if decodes and not (context.tenant.is_admin or is_loopback(body.bootstrap_host)):
        check_named(server.cluster, context.sender, [(body.bootstrap_host, body.bootstrap_port)])
    checked = await server.engine.check_transfers(body.bootstrap_host, body.bootstrap_port)
    log.info(event("transfers_checked", id=context.request_id, wrong=len(checked.wrong)))
    return json_response(checked)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/check_transfers",
        check_transfers,
        body=CheckTransfersRequest,
        answer=Checked,
        text="Ask a decode server to fetch a test from a prefill server, and say how fast that was.",
        access=Access.ADMIN,
        forward=Forward.NONE,
    ),
)
