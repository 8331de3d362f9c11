"""The same request to a server and to a router before a pair of servers, and what differs between the answers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from tests.deadlines import HANGS_S
from tests.route.conftest import CLUSTER_KEY, DECODE, PREFILL, start_router
from tests.server.conftest import start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

_HEADERS = ("content-type", "retry-after", "x-forebay-ignored", "allow")


class Answer(NamedTuple):
    """What clients act on. `body` is the error, or the fields of a success."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Twins:
    alone: httpx.Client
    routed: httpx.Client

    def ask(self, method: str, path: str, content: bytes = b"", **headers: str) -> tuple[Answer, Answer]:
        kind = {"content-type": "application/json"} if method == "POST" else {}
        sent = {name: value for name, value in {**kind, **headers}.items() if value}
        first, second = (
            answer_of(client.request(method, path, content=content, headers=sent))
            for client in (self.alone, self.routed)
        )
        return first, second

    def assert_same(self, method: str, path: str, content: bytes = b"", **headers: str) -> Answer:
        alone, routed = self.ask(method, path, content, **headers)
        assert routed == alone, (method, path, content[:300], headers)
        assert alone.status < 500, alone
        return alone

    def assert_same_bytes(self, request: bytes) -> bytes:
        """One request as it is on the wire; the status line and the error's code."""
        told = [_told(raw(client, request)) for client in (self.alone, self.routed)]
        assert told[0] == told[1], request[:300]
        return told[0]


def answer_of(response: httpx.Response) -> Answer:
    headers = {name: response.headers[name] for name in _HEADERS if name in response.headers}
    try:
        body: Any = response.json()
    except ValueError:
        body = len(response.text.splitlines())
    if isinstance(body, dict) and response.is_success:
        body = sorted(body)
    return Answer(response.status_code, headers, body)


def raw(client: httpx.Client, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0), HANGS_S) as sock:
        sock.sendall(request)
        found = b""
        while part := sock.recv(1 << 16):
            found += part
    return found


def _told(answer: bytes) -> bytes:
    code = re.search(rb'"code":"[a-z_]+"', answer)
    return answer.partition(b"\r\n")[0] + (b" " + code[0] if code else b"")


@contextmanager
def twins(**changes: Any) -> Iterator[Twins]:
    tokenizer = tiny_tokenizer()
    members = [
        [start(tokenizer, FakeEngine, model=one, cluster_key=CLUSTER_KEY, **changes)] for one in (PREFILL, DECODE)
    ]
    routed, alone = start_router(*members, **changes), start(tokenizer, FakeEngine, **changes)
    try:
        with alone.client() as first, routed.client() as second:
            yield Twins(first, second)
    finally:
        routed.close()
        alone.close()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
