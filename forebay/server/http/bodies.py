"""Bodies: read under limits, parsed once, and where they are large not on the event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar

from starlette.types import Receive, Scope

from forebay.base.errors import Overloaded, PayloadTooLarge
from forebay.server.http.errors import OLLAMA, HttpError
from forebay.server.http.json_body import parse_json_object
from forebay.server.http.workers import Workers


class Parsed(Protocol):
    """The type that a body is parsed as."""

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False) -> Self:
        """`lenient`: fields that nobody here knows are passed over. Raises InvalidRequest that names the field."""
        ...


Body = TypeVar("Body", bound=Parsed)

JSON: Final = b"application/json"
INLINE_BYTES: Final = 16 << 10  # parsing that much takes less than a millisecond
ROOM_BYTES: Final = 128 << 20  # for all large bodies together, while they arrive and wait to be parsed


class ClientGone(Exception):
    """The client went away; there is nobody to answer."""


class Bodies:
    """Reads what clients send. Belongs to the event loop."""

    def __init__(self, max_bytes: int, workers: Workers, *, lenient: bool = False) -> None:
        """`max_bytes` is the limit of one body; two of them always have room. `lenient`: as for `Parsed`."""
        self._lenient = lenient
        self._max_bytes = max_bytes
        self._room = max(ROOM_BYTES, 2 * max_bytes)
        self._held = 0
        self._workers = workers

    async def read(self, kind: type[Body], scope: Scope, receive: Receive, max_ids: int) -> Body:
        """The request's body as `kind`, which may hold `max_ids` token ids. Raises InvalidRequest and what `content`
        raises."""
        async with self.content(scope, receive) as content:
            return await self._parse(kind, content, max_ids)

    @contextlib.asynccontextmanager
    async def content(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The request's body as it was sent; a large one takes room as long as it is in use. Raises HttpError for
        another kind of body, PayloadTooLarge as soon as too many bytes are announced or arrive, and Overloaded where
        other bodies take the room."""
        _check_kind(scope)
        self._check_size(_announced_bytes(scope))
        content = bytearray()
        held = 0
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                content += message.get("body", b"")
                self._check_size(len(content))
                if len(content) > INLINE_BYTES:
                    self._held += len(content) - held
                    held = len(content)
                    self._check_room()
                more = message.get("more_body", False)
            yield bytes(content)
        finally:
            self._held -= held

    async def _parse(self, kind: type[Body], content: bytes, max_ids: int) -> Body:
        parse = partial(_parse, kind, content, max_ids, self._lenient)
        return parse() if len(content) <= INLINE_BYTES else await self._workers.run(parse)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise PayloadTooLarge(
                f"the body has {size} bytes or more; at most {self._max_bytes} are read: raise --max-body-bytes"
            )

    def _check_room(self) -> None:
        if self._held > self._room:
            raise Overloaded(f"large bodies take {self._held} bytes; all may have {self._room}: try again later")


def _parse(kind: type[Body], content: bytes, max_ids: int, lenient: bool) -> Body:
    return kind.parse(parse_json_object(content, max_ids), lenient=lenient)


def _check_kind(scope: Scope) -> None:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    if not kinds and scope["path"].startswith(OLLAMA):
        kinds = [JSON]  # some of Ollama's clients name no type; a page's origin is checked before
    if len(kinds) != 1 or kinds[0].split(b";")[0].strip().lower() != JSON:
        raise HttpError(415, "send the body as `Content-Type: application/json`", code="unsupported_media_type")
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in scope["headers"]):
        raise HttpError(415, "compressed bodies are not read: send it as it is", code="unsupported_content_encoding")


def _announced_bytes(scope: Scope) -> int:
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(announced[0][:20]) if announced and announced[0].isdigit() else 0
