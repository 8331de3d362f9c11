"""Tenants share the prefix cache over HTTP: the real server, core and pools over the hash model (C32)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.server.conftest import Running, start
from tests.soak.hash_engine import PAGE, VOCAB, hash_engine
from tests.text.tiny_tokenizer import tiny_tokenizer

KEYS: Final = {"sk-of-alice-0": "alice", "sk-of-bob-000": "bob"}
ALICE, BOB = KEYS
EVEN: Final = dict.fromkeys(KEYS.values(), 1)
LENGTH: Final = 10 * PAGE


@pytest.fixture
def server() -> Iterator[Running]:
    tokenizer, engine = tiny_tokenizer(VOCAB), hash_engine(EVEN)
    running = start(tokenizer, engine.connect, api_keys=(*KEYS,), key_names=KEYS, tenants=EVEN)
    yield running
    running.close()
    assert engine.failure is None, engine.failure


def cached(server: Running, api_key: str, prompt: list[int]) -> int:
    """Send a prompt; return how many tokens of it were cached."""
    with server.client(headers={"Authorization": f"Bearer {api_key}"}) as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_c32_flood_of_one_key_leaves_the_checkpoints_of_another(server: Running) -> None:
    """The cache holds about 4,000 bytes of pages' tokens and 22 states; the flood is several times as much."""
    prompts = [[3 + i] * LENGTH for i in range(3)]
    for prompt in prompts:
        assert cached(server, BOB, prompt) == 0
    for i in range(60):
        cached(server, ALICE, [100 + i] * LENGTH)
    assert [cached(server, BOB, [*prompt, 9]) for prompt in prompts] == [LENGTH] * 3
    assert cached(server, ALICE, [100] * LENGTH + [9]) == 0
    assert cached(server, ALICE, [159] * LENGTH + [9]) == LENGTH
