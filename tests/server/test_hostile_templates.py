"""A checkpoint's template that never ends costs the request that met it, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests import loopback
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

HANGS = (
    "{% if messages[0].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif messages[0].content == 'grow' %}{{ 'x' * 10**9 }}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = start(tiny_tokenizer(template=HANGS), lambda: FakeEngine(wants_resume_points=True))
    yield running
    running.close()


def chat(server: Running, text: str, path: str = "/v1/chat/completions") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}]}
    with loopback.client(base_url=server.url) as http:
        return http.post(path, json=body if path == "/tokenize" else {**body, "max_tokens": 2})


@pytest.mark.slow
def test_as_many_conversations_as_there_are_workers_hang_and_the_next_is_answered(server: Running) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: chat(server, "hang"), range(2)))
    for answer in answers:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "chat_template_error"
    assert chat(server, "hi").status_code == 200
    assert chat(server, "hi", "/tokenize").status_code == 200


def test_a_conversation_that_takes_all_memory_is_told_so(server: Running) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = chat(server, "grow", path).json()["error"]
        assert (error["code"], error["param"]) == ("chat_template_error", "messages")
        assert "MiB" in error["message"]
    assert chat(server, "hi").status_code == 200
