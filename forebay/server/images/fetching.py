"""Images from other hosts, for clients that are not trusted: only from hosts that the operator names, at public
addresses, within a few seconds, and from the very address that was named."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

import httptools

from forebay.base.http_client import is_interim
from forebay.server.images.sources import MAX_SHOWN, Unreadable, check_bytes

TIMEOUT_S: Final = 5.0  # of resolving, connecting and reading together
MAX_URL: Final = 8192  # characters
_PORTS: Final = {"http": 80, "https": 443}
_BLOCK_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 1 << 16  # of an answer
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet, and has none inside that is not."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inside = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if found in _NAT64:
            inside = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inside:
            return is_public(str(inside))
    return found.is_global and not found.is_multicast and not found.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the system's order. Raises OSError if the host has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches from `domains`: names of hosts, with another port than the scheme's own as HOST:PORT."""

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        *,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`is_allowed` is asked about every address of a host."""
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)
        self._max_bytes = max_bytes
        self._resolve, self._is_allowed, self._timeout_s = resolve, is_allowed, timeout_s
        self._tls = ssl.create_default_context() if domains else None  # reads all the system's certificates, once

    async def fetch(self, url: str, on_bytes: Callable[[int], None] = lambda count: None) -> bytes:
        """Return the bytes at `url`. `on_bytes` is called with the number of bytes as they arrive, and may raise.
        Raises Unreadable."""
        place = self._place(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(place, on_bytes)
        except TimeoutError:
            raise Unreadable(
                f"did not arrive from {place.host} within {self._timeout_s:g} s: send it as data"
            ) from None
        except (OSError, httptools.HttpParserError) as error:
            raise Unreadable(
                f"cannot be fetched from {place.host} ({str(error)[:80]}): send it as a data URL"
            ) from error

    def _place(self, url: str) -> _Place:
        if len(url) > MAX_URL:
            raise Unreadable(f"has a URL of {len(url)} characters; at most {MAX_URL} are read")
        parts, host, port = _parts(url)
        named = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
        if named not in self._domains:
            raise Unreadable(
                f"is at {named[:MAX_SHOWN]!a}, which this server does not fetch from (--allowed-media-domains): "
                "send it as a data URL"
            )
        if min(url) <= " ":
            raise Unreadable("has a URL with a space in it: write %20")
        return _Place(host, port or _PORTS[parts.scheme], parts.scheme == "https", named, _target(parts))

    async def _fetch(self, place: _Place, on_bytes: Callable[[int], None]) -> bytes:
        addresses = await self._resolve(place.host, place.port)
        private = [address for address in addresses if not self._is_allowed(address)]
        if private or not addresses:
            where = "an address that is not public" if private else "no address"
            raise Unreadable(f"is at {place.host}, which has {where}: send it as a data URL")
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": place.host} if place.tls else {}
        # To the address that was looked at: a second look-up could have another answer.
        reader, writer = await asyncio.open_connection(addresses[0], place.port, **tls)
        try:
            writer.write(place.request)
            return await self._answer(reader, place, on_bytes)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, place: _Place, on_bytes: Callable[[int], None]) -> bytes:
        answer = _Answer()
        received = 0
        while not answer.is_whole:
            block = await reader.read(_BLOCK_BYTES)
            received += len(block)
            if not block:
                break
            on_bytes(len(block))
            answer.feed(block)
            answer.check(place.host)
            check_bytes(max(answer.announced, len(answer.content), received - _HEAD_BYTES), self._max_bytes)
        if not answer.is_whole and (answer.has_length or not answer.has_head):
            raise Unreadable(f"ended after {len(answer.content)} bytes at {place.host}: send it as a data URL")
        return bytes(answer.content)


def _parts(url: str) -> tuple[SplitResult, str, int | None]:
    """Return a URL's parts, its host without a final dot, and its port if it has one. Raises Unreadable."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        raise Unreadable(f"has a URL that is none ({error}): {url[:MAX_SHOWN]!a}") from error
    if parts.scheme not in _PORTS or not host or parts.username is not None or not url.isascii():
        raise Unreadable(f"is named by {url[:MAX_SHOWN]!a}: only data:, http: and https: URLs are read")
    return parts, host, port


class _Place(NamedTuple):
    host: str
    port: int
    tls: bool
    named: str  # the host, with a port where that is not the scheme's
    target: str

    @property
    def request(self) -> bytes:
        lines = (
            f"GET {self.target} HTTP/1.1",
            f"Host: {self.named}",
            "User-Agent: forebay",
            "Accept: image/*",
            "Accept-Encoding: identity",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


class _Answer:
    """One answer, of which heads of interim ones (1xx) may come first. The parser's callbacks must not raise."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.announced = self.status = 0
        self.is_whole = self.has_head = self.has_length = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, block: bytes) -> None:
        """Parse more of the answer. Raises HttpParserError for bytes that are not HTTP."""
        try:
            self._parser.feed_data(block)
        except httptools.HttpParserUpgrade:  # behind the head of a 101
            self.is_whole = True
        except httptools.HttpParserError:
            # Behind the end nothing counts, and of another status than 200 that is what is wrong.
            if not self.is_whole and (not self.has_head or self.status == HTTPStatus.OK):
                raise

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note how the end of the content is known."""
        if self.is_whole:
            return
        self.has_length |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"content-length" and value.isdigit():
            self.announced = int(value[:20])

    def on_headers_complete(self) -> None:
        """Note that the status is known."""
        if not self.is_whole:
            self.status = self._parser.get_status_code()
            self.has_head = not is_interim(self.status)

    def on_body(self, body: bytes) -> None:
        """Append a piece of the content."""
        if self.has_head and not self.is_whole:
            self.content += body

    def on_message_complete(self) -> None:
        """Note the end. Bytes after it are not read; after an interim answer another one follows."""
        if self.has_head:
            self.is_whole = True
        else:
            self.announced, self.has_length = 0, False

    def check(self, host: str) -> None:
        """Raise Unreadable for an answer that is no content."""
        if self.has_head and 300 <= self.status < 400:
            raise Unreadable(
                f"is answered by {host} with a redirect ({self.status}), which is not followed: name its target"
            )
        if self.has_head and self.status != HTTPStatus.OK:
            raise Unreadable(f"is answered by {host} with status {self.status}: check the URL")
