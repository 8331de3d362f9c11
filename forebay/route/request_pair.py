"""One request at two servers: both get the client's bytes, prefill's answer is drained and decode's is the client's.

What the router adds travels in headers (`server/http/security.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ForebayError
from forebay.base.log import event, get_logger
from forebay.route.members import Member, Members, as_object
from forebay.route.upstream import MEMBER_LOST, Head, Upstream
from forebay.server.http.lifecycle import Watch
from forebay.server.http.security import BOOTSTRAP

ROOM_BITS: Final = 62  # a request with several choices counts on from its room
MOST_ATTEMPTS: Final = 3
_AGAIN: Final = (503, 504)  # the server, or the one that it needs, is going, coming or gone: another one may not be

log = get_logger("route")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A client's request for two servers: its bytes as they came, the headers that are passed on, and the blocks of its
    prompt."""

    path: str
    headers: Mapping[str, str]
    content: bytes
    blocks: Sequence[bytes]

    def headers_for(self, prefill: Member, decode: Member) -> tuple[dict[str, str], dict[str, str]]:
        """Return the headers for prefill and for decode, which meet in a room that nobody else has."""
        room = {f"{BOOTSTRAP}room": str(secrets.randbits(ROOM_BITS))}
        host = {f"{BOOTSTRAP}host": prefill.pool.origin.host}
        port = {f"{BOOTSTRAP}port": str(prefill.bootstrap_port)} if prefill.bootstrap_port else {}
        return {**self.headers, **prefill.proof, **room}, {**self.headers, **decode.proof, **room, **host, **port}


class SentRequest:
    """A request to one server. Made by `begin`; `end` leaves the connection for the next request
    where the answer has come whole, and closes it where not, which tells the server that nobody waits any more."""

    def __init__(self, member: Member, upstream: Upstream) -> None:
        self.member, self.upstream = member, upstream
        self._ended = False
        member.in_flight += 1
        member.num_requests += 1

    @classmethod
    async def begin(cls, member: Member, path: str, headers: Mapping[str, str], content: bytes) -> SentRequest:
        """Raises Unavailable where the server cannot be reached."""
        upstream = await member.pool.take()
        upstream.send("POST", path, headers, content)
        return cls(member, upstream)

    def end(self) -> None:
        """Release the connection to its pool and the member's slot; no-op the second time."""
        if not self._ended:
            self._ended = True
            self.member.in_flight -= 1
            self.member.pool.give_back(self.upstream)


class RequestPair:
    """The requests to prefill and to decode for one client. `end` must be called, and may be called at any time."""

    def __init__(self, prefill: SentRequest, decode: SentRequest) -> None:
        self.prefill, self.decode = prefill, decode
        self.gone = False  # nobody waits for the answer any more

    async def answer(self) -> tuple[SentRequest, Head]:
        """Return the request whose answer the client gets, with its head: decode's, or prefill's if that refuses first,
        since decode would then wait in vain. Raises Unavailable where a connection breaks."""
        theirs = asyncio.ensure_future(self.prefill.upstream.head())
        ours = asyncio.ensure_future(self.decode.upstream.head())
        try:
            await asyncio.wait({theirs, ours}, return_when=asyncio.FIRST_COMPLETED)
            if not ours.done() and (head := theirs.result()).status != 200:
                return self.prefill, head
            return self.decode, await ours
        finally:
            theirs.cancel()
            ours.cancel()

    async def drain(self) -> None:
        """Let prefill come to its end, whose answer says nothing that decode's does not."""
        self.prefill.upstream.relay()
        try:
            await self.prefill.upstream.ended()
        except ForebayError as error:
            log.info(event("prefill_not_drained", at=self.prefill.member.name, reason=error.message))
        finally:
            self.prefill.end()

    def abort(self) -> None:
        """Drop both requests because the client disconnected."""
        self.gone = True
        self.end()

    def end(self) -> None:
        """End both requests."""
        self.prefill.end()
        self.decode.end()


async def begin(members: Members, request: RoutedRequest) -> RequestPair:
    """Send both requests. If a server cannot be reached, mark it as down and raise Unavailable."""
    prefill, decode = members.choose_prefill(request.blocks), members.choose_decode()
    for_prefill, for_decode = request.headers_for(prefill, decode)
    first = await send_request(members, prefill, request.path, for_prefill, request.content)
    try:
        return RequestPair(first, await send_request(members, decode, request.path, for_decode, request.content))
    except ForebayError:
        first.end()
        raise


async def send_request(
    members: Members, member: Member, path: str, headers: Mapping[str, str], content: bytes
) -> SentRequest:
    """Send a request to a member; mark the member as down if it cannot be reached."""
    try:
        return await SentRequest.begin(member, path, headers, content)
    except ForebayError as error:
        members.lost(member, error.message)
        raise


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


async def first_answer(members: Members, request: RoutedRequest, watch: Watch) -> tuple[RequestPair, Head]:
    """Send both requests and return them with the head of decode's answer, a 200. Until then nothing was sent to the
    client, so what a server's coming or going spoils is begun again, at other servers where there are any.

    Raises what the last attempt failed of, as the server said it.
    """
    failure: ForebayError | None = None
    for _ in range(MOST_ATTEMPTS):
        try:
            pair = await begin(members, request)
        except ForebayError as error:
            failure = failure or error
            if error.code != MEMBER_LOST:  # nobody is up
                break
            continue
        watch.on_gone(pair.abort)
        failure, head = await _outcome(pair)
        if failure is None:
            return pair, head
        pair.end()
        if pair.gone or failure.status not in _AGAIN:
            break
        log.info(event("request_begun_again", code=failure.code))
        await asyncio.gather(pair.prefill.member.check(), pair.decode.member.check())
    assert failure is not None
    raise failure


async def _outcome(pair: RequestPair) -> tuple[ForebayError | None, Head]:
    """Decode's head, or why there is no use in it."""
    try:
        sent, head = await pair.answer()
        return None if head.status == 200 else Refused(head, await sent.upstream.whole()), head
    except ForebayError as error:
        return error, Head(error.status, {})
    except BaseException:
        pair.end()
        raise
