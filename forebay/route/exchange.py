"""One client's request at the servers that compute it: one server, or a prefill and a decode server.

All get the client's bytes, and the last one's answer is the client's. What the router adds for a pair travels in
headers (`http/security.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ForebayError, Unavailable
from forebay.base.log import event, get_logger
from forebay.base.proof import BOOTSTRAP, digest_of
from forebay.http.lifecycle import Watch
from forebay.http.tracing import Span, Trace
from forebay.route.hops import LOOP_STATUS
from forebay.route.members import Member, Members, as_object
from forebay.route.selection import Selected
from forebay.route.upstream import MEMBER_LOST, Head, Upstream

ROOM_BITS: Final = 62  # a request with several choices counts on from its room
MOST_ATTEMPTS: Final = 3
# The server, or the one that it needs, is going, coming or gone, or leads back to this router: another one may not.
_AGAIN: Final = (503, 504, LOOP_STATUS)

Select = Callable[[Collection[Member]], Selected[Member]]
"""Returns the members for an attempt, given those that were tried. Raises Unavailable."""

log = get_logger("route")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A client's request: its bytes as they came, the headers that are passed on, and how its members are selected.
    `on_selected` is called with those of each attempt, `on_failed` with those of each that failed."""

    path: str
    headers: Mapping[str, str]
    content: bytes
    select: Select
    on_selected: Callable[[Selected[Member]], None]
    on_failed: Callable[[Selected[Member], ForebayError], None]
    trace: Trace | None = None

    def attempt(self, selected: Selected[Member]) -> Span | None:
        """Return the span of an attempt, which begins now, if the request is traced."""
        if self.trace is None:
            return None
        servers = [member.url for member in selected.members]
        return self.trace.begin(
            "attempt", {"forebay.servers": servers, "forebay.route": str(selected.reason)}, is_client=True
        )

    def headers_for(self, members: Sequence[Member], attempt: Span | None) -> list[dict[str, str]]:
        """Return the headers for each member; those of a pair meet in a room that no other request has. What they
        trace is below the attempt."""
        own = dict(self.headers)
        if self.trace is not None and attempt is not None:
            own["traceparent"] = self.trace.parent_of(attempt)
        if len(members) == 1:
            return [own]
        prefill, decode = members
        room = {f"{BOOTSTRAP}room": str(secrets.randbits(ROOM_BITS))}
        host = {f"{BOOTSTRAP}host": prefill.pool.origin.host}
        port = {f"{BOOTSTRAP}port": str(prefill.bootstrap_port)} if prefill.bootstrap_port else {}
        digest = digest_of(self.content)
        return [
            {**own, **member.proof("POST", self.path, bootstrap, digest)}
            for member, bootstrap in ((prefill, room), (decode, {**room, **host, **port}))
        ]


class SentRequest:
    """A request to one server. Made by `begin`; `end` keeps the connection for the next request if the answer is
    complete, and closes it otherwise, on which the server aborts the request."""

    def __init__(self, member: Member, upstream: Upstream) -> None:
        self.member, self.upstream = member, upstream
        self._ended = False
        member.in_flight += 1
        member.num_requests += 1

    @classmethod
    async def begin(
        cls, members: Members, member: Member, path: str, headers: Mapping[str, str], content: bytes
    ) -> SentRequest:
        """Send a request to a member. If it cannot be reached, mark it as lost and raise Unavailable, as for one that
        was announced to be draining while the router connected."""
        try:
            upstream = await member.pool.take()
        except ForebayError as error:
            members.lost(member, error.message)
            raise
        if obstacle := member.obstacle(members.now):
            member.pool.give_back(upstream)
            raise Unavailable(f"{member.url}: {obstacle}", code=MEMBER_LOST)
        upstream.send("POST", path, headers, content)
        return cls(member, upstream)

    def end(self) -> None:
        """Release the connection to its pool and the member's slot; no-op the second time."""
        if not self._ended:
            self._ended = True
            self.member.in_flight -= 1
            self.member.pool.give_back(self.upstream)


class Exchange:
    """The requests to one server, or to a pair, for one client. `end` must be called, and may be called at any time."""

    def __init__(self, sent: Sequence[SentRequest]) -> None:
        self.sent = sent
        self.gone = False  # the client no longer waits for the answer

    @property
    def answering(self) -> SentRequest:
        """The request whose answer is the client's."""
        return self.sent[-1]

    async def answer(self) -> tuple[SentRequest, Head]:
        """Return the request whose answer the client gets, with its head: the last one's, or prefill's if that refuses
        first, since decode would then wait in vain. Raises Unavailable where a connection breaks."""
        heads = [asyncio.ensure_future(sent.upstream.head()) for sent in self.sent]
        try:
            await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
            if not heads[-1].done() and (head := heads[0].result()).status != 200:
                return self.sent[0], head
            return self.answering, await heads[-1]
        finally:
            for each in heads:
                each.cancel()

    def note_lost(self, members: Members, error: ForebayError) -> None:
        """Mark the members whose connections have broken. The router's own end of a connection is no sign."""
        if error.code == MEMBER_LOST and not self.gone:
            for sent in self.sent:
                if not sent.upstream.is_open:
                    members.lost(sent.member, error.message)

    async def drain(self) -> None:
        """Let prefill come to its end, whose answer says nothing that decode's does not."""
        for sent in self.sent[:-1]:
            sent.upstream.relay()
            try:
                await sent.upstream.ended()
            except ForebayError as error:
                log.info(event("prefill_not_drained", at=sent.member.url, reason=error.message))
            finally:
                sent.end()

    def abort(self) -> None:
        """Drop all requests because the client disconnected."""
        self.gone = True
        self.end()

    def end(self) -> None:
        """End all requests."""
        for sent in self.sent:
            sent.end()


async def begin(
    members: Members, selected: Selected[Member], request: RoutedRequest, attempt: Span | None = None
) -> Exchange:
    """Send a request to all selected members. Raises Unavailable if one cannot be reached."""
    sent: list[SentRequest] = []
    try:
        for member, headers in zip(selected.members, request.headers_for(selected.members, attempt), strict=True):
            sent.append(await SentRequest.begin(members, member, request.path, headers, request.content))
    except BaseException:
        Exchange(sent).end()
        raise
    return Exchange(sent)


class Refused(ForebayError):
    """A member's answer that is no 200: the client gets it as it is."""

    def __init__(self, head: Head, body: bytes) -> None:
        error = as_object(body).get("error")
        said = error if isinstance(error, dict) else {}
        super().__init__(
            str(said.get("message", f"a server answered HTTP {head.status}")),
            code=str(said.get("code", "member_error")),
        )
        self.head, self.body, self.status = head, body, head.status


async def first_answer(members: Members, request: RoutedRequest, watch: Watch) -> tuple[Exchange, Head]:
    """Send a request and return it with the head of its answer, a 200. Until then nothing was sent to the client, so
    a request that a server's coming or going has spoiled is sent again, to other servers. While all
    servers are away for a moment, it waits for one.

    Raises the failure of the last attempt, as the server said it; that of the first if no later one reached a server.
    """
    failure: ForebayError | None = None
    tried: set[Member] = set()
    for _ in range(MOST_ATTEMPTS):
        try:
            selected = await _select(members, request, tried, watch)
        except ForebayError as error:
            raise failure or error from None
        request.on_selected(selected)
        attempt = request.attempt(selected)
        try:
            exchange = await begin(members, selected, request, attempt)
        except ForebayError as error:
            request.on_failed(selected, error)
            end_span(attempt, error)
            failure = failure or error
            tried.update(member for member in selected.members if not member.up)  # the other one got nothing
            continue
        tried.update(selected.members)
        watch.on_gone(exchange.abort)
        failure, head = await _outcome(exchange)
        if failure is None:
            return exchange, head
        end_span(attempt, failure)
        request.on_failed(selected, failure)
        exchange.note_lost(members, failure)
        exchange.end()
        if exchange.gone or failure.status not in _AGAIN:
            break
        log.info(event("request_begun_again", code=failure.code))
        await asyncio.gather(*map(members.health.check_now, selected.members))  # it may have other weights
    assert failure is not None
    raise failure


def end_span(span: Span | None, error: ForebayError) -> None:
    """End a span by an error, if there is one; that of an attempt which succeeds ends with its request."""
    if span is not None:
        span.end(error.code)


async def _select(
    members: Members, request: RoutedRequest, tried: Collection[Member], watch: Watch
) -> Selected[Member]:
    """Return the members for an attempt. If there are none, wait as long as that may change soon."""
    while True:
        try:
            return request.select(tried)
        except Unavailable:
            if watch.gone or not members.health.may_recover(tried):
                raise
        await members.health.recovery()


async def _outcome(exchange: Exchange) -> tuple[ForebayError | None, Head]:
    """Return the head of the answer, and why it is of no use, if so."""
    try:
        sent, head = await exchange.answer()
        return None if head.status == 200 else Refused(head, await sent.upstream.whole()), head
    except ForebayError as error:
        return error, Head(error.status, {})
    except BaseException:
        exchange.end()
        raise
