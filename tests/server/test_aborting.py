"""Requests are ended by the ids that their clients know."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from tests.deadlines import HANGS_S
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

FIRST, OTHER = "sk-first-0123456789", "sk-other-0123456789"


def post(server: Running, path: str, key: str, **body: Any) -> httpx.Response:
    with server.client(headers={"authorization": f"Bearer {key}"}) as http:
        return http.post(path, json=body)


def test_c29_only_ones_own_requests_are_ended_by_their_ids(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True), api_keys=(FIRST, OTHER))
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(post(server, "/generate", FIRST, text="hello", rid="mine"))

    asking = threading.Thread(target=ask)
    asking.start()
    server.until(lambda: len(server.engine.submitted) == 1)
    for stranger in ({"rid": "mine"}, {"abort_all": True}):
        assert post(server, "/abort_request", OTHER, **stranger).json()["aborted"] == 0
    assert server.engine.aborted == []
    assert post(server, "/abort_request", FIRST, rid="mine").json() == {"success": True, "aborted": 1}
    asking.join(HANGS_S)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert post(server, "/abort_request", FIRST, rid="mine").json()["aborted"] == 0
    assert post(server, "/abort_request", FIRST).json()["error"]["param"] == "rid"
