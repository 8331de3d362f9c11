"""Bodies: read under limits and parsed once, large ones on a thread of their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar

from starlette.types import Scope

from forebay.base import json_text
from forebay.base.errors import InvalidRequest, Overloaded, PayloadTooLarge
from forebay.base.proof import PROOF, digest_of
from forebay.base.room import Room
from forebay.http.encodings import coding_of, decoded
from forebay.http.errors import LLAMA_SERVER, OLLAMA, HttpError
from forebay.http.lifecycle import ClientGone
from forebay.http.preparation import Client
from forebay.http.workers import Workers


class Parsed(Protocol):
    """The type that a body is parsed as."""

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        """Return the body as a value of the route's type. `lenient`: unknown fields are ignored; `images`: messages may
        have images. Raises InvalidRequest that names the field."""
        ...


Body = TypeVar("Body", bound=Parsed)

BODY_DIGEST: Final = "forebay.body_digest"  # of a scope: the SHA-256 that its body must have, or ""
JSON: Final = b"application/json"
INLINE_BYTES: Final = 16 << 10  # parsing that much takes less than a millisecond
STEP_BYTES: Final = 1 << 20  # of a compressed body that are decoded in one turn of a worker
ROOM_BYTES: Final = 128 << 20  # for all large bodies together, while they arrive and wait to be parsed; see `Room`


class Bodies:
    """Reads what clients send. Belongs to the event loop."""

    def __init__(
        self,
        max_bytes: int,
        workers: Workers,
        weights: Mapping[str, int],
        *,
        lenient: bool = False,
        images: bool = False,
    ) -> None:
        """`max_bytes` is the limit of one body, as it was sent and decoded; two of them, or one that is compressed,
        always have room. Tenants share the room by their `weights`. `lenient` and `images`: as for `Parsed`."""
        self._lenient, self._images = lenient, images
        self._max_bytes = max_bytes
        self._room_bytes = max(ROOM_BYTES, 2 * max_bytes)
        self._room = Room(weights)
        self._workers = workers

    async def read(self, kind: type[Body], scope: Scope, client: Client, max_ids: int) -> Body:
        """The request's body as `kind`, which may hold `max_ids` token ids. Raises InvalidRequest and what `content`
        raises."""
        async with self.content(scope, client) as sent, self.decoded(scope, client, sent) as content:
            parse = partial(_parse, kind, content, max_ids, self._lenient, self._images)
            return parse() if len(content) <= INLINE_BYTES else await self._workers.run(client, parse)

    @contextlib.asynccontextmanager
    async def content(self, scope: Scope, client: Client) -> AsyncIterator[bytes]:
        """The request's body as it was sent, compressed or not; a large one takes room as long as it is in use.

        When the body is complete, its client is watched. Raises HttpError for another kind of body, ClientGone, and
        PayloadTooLarge as soon as too many bytes are announced or arrive. Raises Overloaded if other bodies take the
        room, and those of this tenant its share.
        """
        size, content = _announced_bytes(scope), bytearray()
        held = 0
        try:
            more = True
            while more and size <= self._max_bytes:
                message = await client.watch.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                content += message.get("body", b"")
                size = len(content)
                if size > INLINE_BYTES:
                    self._take_room(client.tenant, len(content) - held)
                    held = len(content)
                more = message.get("more_body", False)
            if size > self._max_bytes:
                raise self._too_large(size)
            client.watch.start()
            whole = bytes(content)
            await self._check_digest(scope, client, whole)
            yield whole
        finally:
            self._room.leave(client.tenant, held)

    @contextlib.asynccontextmanager
    async def decoded(self, scope: Scope, client: Client, sent: bytes) -> AsyncIterator[bytes]:
        """A request's body without its content coding; a large one takes room before it is decoded, and on a worker.
        Raises InvalidRequest for a broken encoding, and as `content` for one that is too large."""
        coding = coding_of(scope["headers"])
        if not coding:
            yield sent
            return
        pieces, whole, held = decoded(coding, sent), bytearray(), 0
        try:
            done = len(sent) <= INLINE_BYTES and _extend(whole, pieces, INLINE_BYTES)
            while not done:
                step = min(STEP_BYTES, self._max_bytes - len(whole))
                self._take_room(client.tenant, step)
                held += step
                done = await self._workers.run(client, partial(_extend, whole, pieces, len(whole) + step))
                if len(whole) > self._max_bytes:
                    raise self._too_large(len(whole))
            yield bytes(whole)
        finally:
            self._room.leave(client.tenant, held)

    async def _check_digest(self, scope: Scope, client: Client, content: bytes) -> None:
        """Raise HttpError 403 for another body than the one that the sender has proved."""
        expected = scope.get(BODY_DIGEST)
        if not expected:
            return
        found = (
            digest_of(content)
            if len(content) <= INLINE_BYTES
            else await self._workers.run(client, partial(digest_of, content))
        )
        if found != expected:
            why = f"the proof in {PROOF} is of another body: make one for each message"
            raise HttpError(403, why, code="cluster_key_required", type="permission_error")

    def _too_large(self, size: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body has {size} bytes or more, sent or decoded; at most {self._max_bytes} are read: raise "
            "--max-body-bytes"
        )

    def _take_room(self, tenant: str, num_bytes: int) -> None:
        if not self._room.has_room(tenant, self._room_bytes, num_bytes):
            raise Overloaded(f"large bodies take the {self._room_bytes} bytes that all may have: try again later")
        self._room.enter(tenant, num_bytes)


def _extend(whole: bytearray, pieces: Iterator[bytes], num_bytes: int) -> bool:
    """Append pieces until there are more than `num_bytes`, and return whether these were all."""
    for piece in pieces:
        whole += piece
        if len(whole) > num_bytes:
            return False
    return True


def _parse(kind: type[Body], content: bytes, max_ids: int, lenient: bool, images: bool) -> Body:
    return kind.parse(parse_json_object(content, max_ids), lenient=lenient, images=images)


def _announced_bytes(scope: Scope) -> int:
    """Return the length that the headers announce, 0 if none. Raises HttpError for another kind of body."""
    # Ollama and llama-server read a body whatever its type is, and `curl -d` says that it is a form. Requests of pages
    # of other origins, which may send forms, were refused before.
    if not (scope["path"].startswith(OLLAMA) or scope["path"] in LLAMA_SERVER):
        kinds = [value for name, value in scope["headers"] if name == b"content-type"]
        if len(kinds) != 1 or kinds[0].split(b";")[0].strip().lower() != JSON:
            raise HttpError(415, "send the body as `Content-Type: application/json`", code="unsupported_media_type")
    coding_of(scope["headers"])
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(announced[0][:20]) if announced and announced[0].isdigit() else 0


MAX_CONTAINERS: Final = 20_000
MAX_VALUES: Final = 5 * MAX_CONTAINERS  # beside token ids; the objects that are known have fewer each
MAX_STRINGS: Final = 2 * MAX_VALUES  # keys are strings too


def parse_json_object(body: bytes, max_ids: int = 0) -> dict[str, Any]:
    """The object in `body`. Raises InvalidRequest for a body that is not UTF-8 or not strict JSON (NaN, Infinity, a
    BOM), or that has a key twice in one object. So does a body that is nested deeper than `json_text.MAX_DEPTH`. The
    other limits are `MAX_CONTAINERS` objects and lists, `MAX_STRINGS` strings or `MAX_VALUES` + `max_ids` values."""
    _check_size(body, MAX_VALUES + max_ids)
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _invalid("a number has too many digits") from error
    if not isinstance(value, dict):
        raise _invalid(f"it is a {_KINDS.get(type(value), 'value')}, not an object")
    return value


_KINDS: Final = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a JSON object as expected: {what}", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _invalid(f"the key {twice[:64]!a} occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise _invalid(f"{name} is not a JSON number")


def _check_size(body: bytes, max_values: int) -> None:
    """Before parsing: the parser recurses, and every value costs tens of bytes and is looked at again and again."""
    # Each quote within a string has a backslash before it, so of each string's own two one or both are counted.
    quotes = body.count(b'"') - body.count(b'\\"')
    if quotes > 2 * MAX_STRINGS:
        raise _invalid(f"it has {quotes // 2} strings or more; at most {MAX_STRINGS} are read")
    if not json_text.may_be_deep(body) and body.count(b",") < max_values:
        return
    outside = json_text.outside_strings(body)
    num_values = outside.count(b",") + 1
    if num_values > max_values:
        raise _invalid(f"it has {num_values} values or more; at most {max_values} are read")
    brackets = json_text.brackets_of(outside)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise _invalid(f"it has {len(brackets) // 2} lists and objects; at most {MAX_CONTAINERS} are read")
    if json_text.is_deep(brackets):
        raise _invalid(json_text.TOO_DEEP)
