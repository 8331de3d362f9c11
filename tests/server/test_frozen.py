"""A server that was stopped for a while, and all its clients with it, as far as it can see."""

from __future__ import annotations

import select
import time

import pytest

from forebay.base.loop_clock import LoopClock
from tests.deadlines import POLL_S, wait_until


def test_time_in_which_nobody_ran_is_none_that_a_client_took(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's clock no time passes; by the event loop's the headers are long due."""
    now = [100.0]
    monkeypatch.setattr("forebay.http.listen.LoopClock", lambda: LoopClock(lambda: now[0]))
    server = launch(header_timeout_s=0.05)
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: ")
        time.sleep(0.3)
        sock.sendall(b"localhost\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    with server.connect() as late:
        late.sendall(b"GET /health HTTP/1.1\r\nhost: ")

        def is_answered() -> bool:
            now[0] += 0.05  # which counts once the server has seen the connection
            return bool(select.select([late], [], [], POLL_S)[0])

        wait_until(is_answered)
        assert late.recv(4096).startswith(b"HTTP/1.1 408")
