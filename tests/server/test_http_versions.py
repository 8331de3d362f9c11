"""Requests as other clients write them: with offers of other protocols, and of HTTP/1.0."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import pytest

from forebay.http.parser import RequestParser
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

JAVA = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
OFFERS = [
    JAVA,
    "Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Key: x\r\n",
    "connection:upgrade\r\nupgrade: TLS/1.0, h2c\r\n",
    "Connection: close, upgrade\r\nUpgrade: x\r\n",
]
BODY = '{"a": [1, "é"]}'.encode()
FRAMED = [
    ("", b""),
    ("Content-Length: 0\r\n", b""),
    (f"Content-Length: {len(BODY)}\r\n", BODY),
    (
        "Transfer-Encoding: chunked\r\n",
        b"5\r\n%b\r\n%x;x=y\r\n%b\r\n0\r\nX-Trailer: t\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:]),
    ),
]


class Recorded:
    """What a parser says, pieces of a body as one."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def on_message_begin(self) -> None:
        self.said.append("begin")

    def on_url(self, url: bytes) -> None:
        self.said.append(self.said.pop() + url if isinstance(self.said[-1], bytes) else url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in (b"connection", b"upgrade", b"http2-settings", b"sec-websocket-key"):
            self.said.append((name, value))

    def on_headers_complete(self) -> None:
        self.said.append("headers")

    def on_body(self, body: bytes) -> None:
        self.said.append(self.said.pop() + body if isinstance(self.said[-1], bytearray) else bytearray(body))

    def on_message_complete(self) -> None:
        self.said.append("complete")


@pytest.mark.parametrize("offer", OFFERS)
def test_parser_reads_requests_with_an_offer_as_without(offer: str) -> None:
    """Two requests in a row and one without an offer, cut at every place."""
    for framing, body in FRAMED:
        heads = [
            f"POST /a HTTP/1.1\r\nHost: localhost\r\n{more}{framing}X-Last: 1\r\n\r\n".encode() for more in (offer, "")
        ]
        plain = Recorded()
        httptools.HttpRequestParser(plain).feed_data((heads[1] + body) * 3)
        sent = (heads[0] + body) * 2 + heads[1] + body
        for at in range(len(sent) + 1):
            recorded = Recorded()
            parser = RequestParser(recorded)
            parser.feed_data(sent[:at])
            parser.feed_data(sent[at:])
            expected = plain.said[: plain.said.index("complete") + 1] if "close" in offer else plain.said
            assert recorded.said == expected
        assert recorded.said.count("complete") == (1 if "close" in offer else 3)


def test_parser_whose_request_is_malformed_behind_an_offer_raises() -> None:
    head = f"POST /a HTTP/1.1\r\n{JAVA}Transfer-Encoding: chunked\r\n\r\n".encode()
    with pytest.raises(httptools.HttpParserError):
        RequestParser(Recorded()).feed_data(head + b"zz\r\n")
    with pytest.raises(httptools.HttpParserError):
        RequestParser(Recorded()).feed_data(
            f"POST /a HTTP/1.1\r\n{JAVA}Content-Length: 1\r\nContent-Length: 2\r\n\r\n".encode()
        )


@pytest.fixture(scope="module")
def server(patience: None) -> Iterator[Running]:
    running = start(tiny_tokenizer(), FakeEngine, body_timeout_s=5.0)
    yield running
    running.close()


def chat(version: str, more: str = "", method: str = "POST", path: str = "/v1/completions", **body: Any) -> bytes:
    content = json.dumps({"prompt": "Hi", "max_tokens": 3, **body}).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def answers(server: Running, *pieces: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with server.connect() as sock:
        for piece in pieces:
            sock.sendall(piece)
        return received(sock)


def received(sock: socket.socket) -> bytes:
    out = b""
    while block := sock.recv(1 << 16):
        out += block
    return out


@pytest.mark.parametrize("offer", OFFERS)
def test_server_answers_a_request_with_an_offer_and_the_next_one(server: Running, offer: str) -> None:
    offered, last = chat("1.1", offer), chat("1.1", "Connection: close\r\n")
    closes = "close" in offer
    got = answers(server, offered[:-5], offered[-5:] + (b"" if closes else last))
    assert got.count(b"HTTP/1.1 200 OK") == (1 if closes else 2)
    assert got.count(b'"completion_tokens":3') == (1 if closes else 2)
    streamed = answers(server, chat("1.1", offer, stream=True) + (b"" if closes else last))
    assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in streamed


@pytest.mark.parametrize("more", ["", "Connection: keep-alive\r\n", JAVA])
def test_stream_of_http_1_0_ends_with_the_connection_and_has_no_chunks(server: Running, more: str) -> None:
    got = answers(server, chat("1.0", more, stream=True))
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") or not line for line in body.split(b"\n"))
    expected = answers(server, chat("1.1", "Connection: close\r\n", stream=True)).partition(b"\r\n\r\n")[2]
    assert body.count(b"data: ") == expected.count(b"data: ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (chat("1.0"), 200),
        (chat("1.0", "Expect: 100-continue\r\n"), 200),
        (chat("1.0", method="GET", path="/health"), 200),
        (chat("1.0", method="GET", path="/metrics"), 200),
        (chat("1.0", method="GET", path="/"), 200),
        (chat("1.0", method="HEAD", path="/health"), 200),
        (chat("1.0", path="/nowhere"), 404),
        (chat("1.0", max_tokens=-1), 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 400),
    ],
)
def test_answer_of_http_1_0_is_one_answer_with_its_length_or_none(server: Running, sent: bytes, status: int) -> None:
    got = answers(server, sent)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"transfer-encoding" not in head.lower()
    lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    assert sent.startswith(b"HEAD") or lengths in ([], [len(body)])
    assert not (sent.startswith(b"HEAD") and body)


def test_expectation_is_met_before_the_body_and_not_if_the_request_is_refused(launch: Callable[..., Running]) -> None:
    server = launch(FakeEngine, max_body_bytes=4096)
    sent = chat("1.1", f"Expect: 100-Continue\r\n{JAVA}")
    head, _, body = sent.partition(b"\r\n\r\n")
    with server.connect() as sock:
        sock.sendall(head + b"\r\n\r\n")
        interim = b""
        while not interim.endswith(b"\r\n\r\n"):
            interim += sock.recv(1)
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body + chat("1.1", "Connection: close\r\n"))
        assert received(sock).count(b"HTTP/1.1 200 OK") == 2
    large = head[: head.rindex(b"Content-Length")] + b"Content-Length: 9999\r\n\r\n"
    refused = answers(server, large)
    assert refused.startswith(b"HTTP/1.1 413 ")  # and closed: no body will come
    assert b"connection: close" in refused.lower()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_absolute_target_is_read_with_its_authority(server: Running, version: str) -> None:
    sent = chat(version, f"{JAVA}Connection: close\r\n", path="http://localhost/v1/completions")
    assert b'"completion_tokens":3' in answers(server, sent)


def test_connect_and_the_preface_of_http_2_are_refused(server: Running) -> None:
    for sent in (
        b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\nConnection: close\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        assert answers(server, sent).split(b" ")[1][:1] == b"4"
