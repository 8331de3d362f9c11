"""httptools' parser of requests, for a server that stays with HTTP/1.1.

A client may offer another protocol with a request (`Upgrade: h2c`, as Java's client does with each one). A server that
does not take the offer answers the request as it is (RFC 9110, 7.8). llhttp stops at such a request and takes its body
for data of the other protocol. So the parser reads the body behind a head of its own, which has the framing alone.
"""

from __future__ import annotations

from typing import Final, Protocol

import httptools

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_HEAD: Final = b"%b / HTTP/%b\r\n%b\r\n"


_OFFER: Final = frozenset({b"upgrade", b"http2-settings"})


class Callbacks(Protocol):
    """What a parser calls as it reads."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Calls `callbacks` as httptools' parser does, for requests with an offer as for those without."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._parser = self._new()
        self._framing: list[bytes] = []
        self._in_own_head = False

    def feed_data(self, data: bytes) -> None:
        """Parse more of the connection's bytes. Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.get_method() == b"CONNECT":
                    raise
                head = _HEAD % (self.get_method(), self.get_http_version().encode(), b"".join(self._framing))
                self._parser, self._in_own_head = self._new(), True  # the old one reads nothing behind the last request
                data = head + data[offer.args[0] :]

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def on_message_begin(self) -> None:
        if not self._in_own_head:
            self._framing = []
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._in_own_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_own_head:
            return
        if name.lower() in _FRAMING:
            kept = _without_offer(value) if name.lower() == b"connection" else value
            self._framing.append(b"%b: %b\r\n" % (name, kept))
        self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._in_own_head:
            self._callbacks.on_headers_complete()
        self._in_own_head = False

    def on_body(self, body: bytes) -> None:
        self._callbacks.on_body(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self.get_method() != b"CONNECT":
            return  # its body follows
        self._callbacks.on_message_complete()


def _without_offer(connection: bytes) -> bytes:
    return b",".join(token for token in connection.split(b",") if token.strip().lower() not in _OFFER)
