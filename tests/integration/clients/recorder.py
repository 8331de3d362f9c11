"""A proxy between a client and a server that records what they exchange."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from tests import loopback

HOP: Final = frozenset({"connection", "content-length", "host", "transfer-encoding", "accept-encoding"})


@dataclass(frozen=True)
class Exchange:
    """One request and the whole of its response."""

    method: str
    path: str
    body: bytes
    status: int
    answer: bytes

    @property
    def json(self) -> dict[str, Any]:
        """Return the body of the request."""
        found: dict[str, Any] = json.loads(self.body)
        return found


class Recorder:
    """`exchanges` has all that passed, in the order in which the responses ended."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self.ignored: set[str] = set()
        self._http = loopback.client(base_url=url)
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do(self) -> None:
                recorder.forward(self)

            do_GET = do_POST = do_DELETE = do_HEAD = do

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a request on, and its response back as it comes."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {key: value for key, value in handler.headers.items() if key.lower() not in HOP}
        pieces: list[bytes] = []
        with self._http.stream(handler.command, handler.path, content=body, headers=headers) as response:
            self.ignored |= {*response.headers.get("x-forebay-ignored", "").split(", ")} - {""}
            handler.send_response(response.status_code)
            for key, value in response.headers.items():
                if key.lower() not in HOP:
                    handler.send_header(key, value)
            handler.send_header("connection", "close")
            handler.end_headers()
            for piece in response.iter_raw():
                pieces.append(piece)
                handler.wfile.write(piece)
                handler.wfile.flush()
            handler.close_connection = True
        done = Exchange(handler.command, handler.path, body, response.status_code, b"".join(pieces))
        self.exchanges.append(done)

    def posts(self, path: str) -> list[Exchange]:
        """Return the exchanges that were posted to a path, whatever its query."""
        return [each for each in self.exchanges if each.method == "POST" and each.path.partition("?")[0] == path]

    def refused(self) -> list[tuple[str, int, bytes]]:
        """Return what the server refused."""
        return [(each.path, each.status, each.answer) for each in self.exchanges if each.status >= 400]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._http.close()


@contextmanager
def recorded(url: str) -> Iterator[Recorder]:
    recorder = Recorder(url)
    try:
        yield recorder
    finally:
        recorder.close()
