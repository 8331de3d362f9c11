"""httptools' parser of requests, for a server that stays with HTTP/1.1.

A client may offer another protocol with a request (`Upgrade: h2c`, as Java's client does with each one). A server that
does not take the offer answers the request as it is (RFC 9110, 7.8). llhttp stops at such a request and takes its body
for data of the other protocol. So a second parser reads the body, behind a head that has the framing alone.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import httptools

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_OFFER: Final = frozenset({b"upgrade", b"http2-settings"})
_CONNECT: Final = b"CONNECT"


class RequestParser:
    """Calls the methods of `callbacks` as httptools' parser does, with an offer as without."""

    def __init__(self, callbacks: Any) -> None:
        self._calls = _Calls(callbacks, weakref.ref(self))
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Parse more of the connection's bytes. Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.get_method() == _CONNECT:
                    raise
                version = self.get_http_version().encode()
                head = b"%b / HTTP/%b\r\n%b\r\n" % (self.get_method(), version, b"".join(self._calls.framing))
                self._calls.in_own_head = True
                self._parser = self._new()  # behind the last request of a connection the other one reads nothing
                data = head + data[offer.args[0] :]

    def should_upgrade(self) -> bool:
        """Return False: no other protocol is spoken."""
        return False

    def should_keep_alive(self) -> bool:
        """Return whether the connection stays open behind the request."""
        return self._parser.should_keep_alive()

    def get_method(self) -> bytes:
        """Return the method of the request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Return the version of the request, such as 1.1."""
        return self._parser.get_http_version()

    @property
    def has_offer(self) -> bool:
        """Whether the body of the request is yet to be read, behind a head without the offer."""
        return self._parser.should_upgrade() and self.get_method() != _CONNECT

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._calls)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser


class _Calls:
    """Passes calls on, but for those of a head that the parser has written itself."""

    def __init__(self, callbacks: Any, parser: weakref.ref[RequestParser]) -> None:
        self._callbacks, self._parser = callbacks, parser
        self.framing: list[bytes] = []
        self.in_own_head = False
        self.on_body = callbacks.on_body

    def on_message_begin(self) -> None:
        if not self.in_own_head:
            self.framing = []
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_own_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_own_head:
            return
        if name.lower() in _FRAMING:
            kept = _without_offer(value) if name.lower() == b"connection" else value
            self.framing.append(b"%b: %b\r\n" % (name, kept))
        self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_own_head:
            self._callbacks.on_headers_complete()
        self.in_own_head = False

    def on_message_complete(self) -> None:
        parser = self._parser()
        if parser is not None and not parser.has_offer:
            self._callbacks.on_message_complete()


def _without_offer(connection: bytes) -> bytes:
    return b",".join(token for token in connection.split(b",") if token.strip().lower() not in _OFFER)
