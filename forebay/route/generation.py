"""The routes whose requests are computed: sent to one server or a pair, and begun again until the first byte."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.http.errors import error_ending
from forebay.http.lifecycle import ClientGone
from forebay.http.protocol import Connection
from forebay.route.exchange import Exchange, Refused, RoutedRequest, Select, first_answer
from forebay.route.forwarding import name_servers, passed_back, passed_on, path_of
from forebay.route.members import Member
from forebay.route.router import Router
from forebay.route.selection import Selected
from forebay.server.context import RequestContext


async def generate(request: Request, router: Router) -> Response:
    """Send a request to a server, or to a prefill and a decode server, and return the answer."""

    async def select_by(content: bytes) -> Select:
        context = RequestContext.of(request.scope)
        async with router.bodies.decoded(request.scope, context.client, content) as plain:
            blocks = await router.blocks(context.client, context.tenant, plain)
        return partial(router.members.select, blocks)

    return await _computed(request, router, select_by)


async def pooled(request: Request, router: Router) -> Response:
    """Return the answer of one server that computes prompts: nothing comes behind these."""

    async def select_by(content: bytes) -> Select:
        return router.members.select_for_prompt

    return await _computed(request, router, select_by)


async def _computed(request: Request, router: Router, select_by: Callable[[bytes], Awaitable[Select]]) -> Response:
    context = RequestContext.of(request.scope)
    attempts: list[float] = []
    async with contextlib.AsyncExitStack() as undo:
        async with router.bodies.content(request.scope, context.client) as content:
            undo.enter_context(router.lifecycle.admit(context.tenant.name, 1))
            watch = context.client.watch
            routed = RoutedRequest(
                path=path_of(request),
                headers=passed_on(request, router.id),
                content=content,
                select=await select_by(content),
                on_selected=partial(_note_selected, router, context, attempts),
                on_failed=lambda selected, error: router.metrics.count_failed_attempt(selected.members, error.code),
                trace=context.trace,
            )
            try:
                exchange, head = await first_answer(router.members, routed, watch)
            except Refused as refused:
                router.metrics.count_error(refused.code)
                return Response(refused.body, refused.status, passed_back(refused.head))
            except ForebayError:
                if watch.gone:
                    raise ClientGone from None
                raise
        router.metrics.count_answer(exchange.answering.member, time.monotonic() - attempts[-1], len(attempts))
        router.under_way.add(exchange)
        undo.callback(router.under_way.discard, exchange)
        undo.callback(_end, router, exchange)
        if "content-length" in head.headers:  # a stream has none, of events or of lines
            return Response(await _whole(router, exchange), headers=passed_back(head))
        return _Relayed(router, context, exchange, passed_back(head), undo.pop_all())


def _note_selected(router: Router, context: RequestContext, attempts: list[float], selected: Selected[Member]) -> None:
    """Note an attempt, by the time at which it begins."""
    attempts.append(time.monotonic())
    router.metrics.count_selected(selected.reason)
    name_servers(context, selected)


async def _whole(router: Router, exchange: Exchange) -> bytes:
    try:
        return await exchange.answering.upstream.whole()
    except ForebayError as error:
        exchange.note_lost(router.members, error)
        if exchange.gone:
            raise ClientGone from None
        raise


def _end(router: Router, exchange: Exchange) -> None:
    """End the exchange. If only prefill's request is still open, it is drained in the background: the client does not
    wait for it."""
    if exchange.answering.upstream.at_rest and not exchange.gone:
        router.spawn(exchange.drain())
        exchange.answering.end()
    else:
        exchange.end()


class _Relayed(Response):
    """A stream, piece by piece as it comes. Owns `undo`, which ends the request at its servers."""

    def __init__(
        self,
        router: Router,
        context: RequestContext,
        exchange: Exchange,
        headers: dict[str, str],
        undo: contextlib.AsyncExitStack,
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._connection: Connection = context.connection
        self._router, self._send, self._exchange, self._undo = router, context.send, exchange, undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._undo:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            upstream, ending = self._exchange.answering.upstream, b""
            upstream.relay(self._write)
            try:
                await upstream.ended()
            except ForebayError as error:
                self._exchange.note_lost(self._router.members, error)
                ending = error_ending(error, scope["path"])
            await self._send({"type": "http.response.body", "body": ending, "more_body": False})

    def _write(self, piece: bytes) -> None:
        if not self._connection.write_chunk(piece):
            self._exchange.abort()


async def abort_request(request: Request, router: Router) -> Response:
    """Ids are known to servers, each of which computes a part, and the router does not know whose they are."""
    raise InvalidRequest(
        "/abort_request is not answered by a router: close the request's connection, which ends it at its servers",
        code="unsupported_route",
    )
