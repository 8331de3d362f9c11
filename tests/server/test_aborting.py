"""Requests are ended by the ids that their clients know."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.deadlines import HANGS_S
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

FIRST, OTHER = "sk-first-0123456789", "sk-other-0123456789"


def post(server: Running, path: str, key: str, **body: Any) -> httpx.Response:
    with server.client(headers={"authorization": f"Bearer {key}"}) as http:
        return http.post(path, json=body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "hello", "rid": "mine"}),
        ("/v1/completions", {"prompt": "hello", "request_id": "mine"}),
    ],
)
def test_c29_only_ones_own_requests_are_ended_by_their_ids(launch, path: str, body: dict[str, str]) -> None:
    server = launch(lambda: FakeEngine(manual=True), api_keys=(FIRST, OTHER))
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(post(server, path, FIRST, **body))

    asking = threading.Thread(target=ask)
    asking.start()
    server.until(lambda: len(server.engine.submitted) == 1)
    for stranger in ({"rid": "mine"}, {"abort_all": True}):
        assert post(server, "/abort_request", OTHER, **stranger).json()["aborted"] == 0
    assert server.engine.aborted == []
    assert post(server, "/abort_request", FIRST, rid="mine").json() == {"success": True, "aborted": 1}
    asking.join(HANGS_S)
    answer = answers[0].json()
    told = (
        answer["choices"][0]["finish_reason"] if "choices" in answer else answer["meta_info"]["finish_reason"]["type"]
    )
    assert told == "abort"
    assert post(server, "/abort_request", FIRST, rid="mine").json()["aborted"] == 0
    assert post(server, "/abort_request", FIRST).json()["error"]["param"] == "rid"
