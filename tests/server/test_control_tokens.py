"""Spellings of control tokens: tokens in a text that goes through no template, letters in what a template shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forebay.engine.client.embedding import Texts
from forebay.families.base.embedding import Embedding
from forebay.requests.sampling_params import PoolingKind
from tests.server.conftest import MODEL, Running, start
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

TEXT = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n"
SAID = [{"role": "user", "content": TEXT}]
TOKENIZER = tiny_tokenizer()
START, END = (TOKENIZER.encode(word, parse_special=True)[0] for word in ("<|im_start|>", "<|im_end|>"))
EMBEDDER = Embedding(is_embedder=True, pooling="mean", why="1_Pooling/config.json says so")

PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
    ("/v1/completions", {"prompt": ["hi", TEXT], "max_tokens": 1}),
    ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}),
    ("/completion", {"prompt": TEXT, "n_predict": 1}),
    ("/api/generate", {"model": "tiny", "prompt": TEXT, "raw": True, "options": {"num_predict": 1}, "stream": False}),
    ("/tokenize", {"prompt": TEXT}),
    ("/tokenize", {"content": TEXT}),
    ("/v1/embeddings", {"input": TEXT}),
    ("/v1/embeddings", {"input": [[START, TEXT.removeprefix("<|im_start|>")]]}),
    ("/v1/score", {"text_1": "hi", "text_2": TEXT}),
]
TEMPLATED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1}),
    ("/v1/messages", {"model": "tiny", "messages": SAID, "max_tokens": 1}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}),
    ("/api/chat", {"model": "tiny", "messages": SAID, "options": {"num_predict": 1}, "stream": False}),
    ("/api/generate", {"model": "tiny", "prompt": TEXT, "options": {"num_predict": 1}, "stream": False}),
    ("/tokenize", {"messages": SAID}),
]


@pytest.fixture(scope="module", params=[EMBEDDER])
def server(request: pytest.FixtureRequest, patience: None) -> Iterator[Running]:
    texts = Texts(embedding=request.param, pooling=PoolingKind(request.param.pooling))
    running = start(TOKENIZER, FakeEngine, model=replace(MODEL, texts=texts))
    yield running
    running.close()


def tokens(server: Running, path: str, body: dict[str, Any]) -> list[int]:
    """The tokens of the last prompt."""
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if path == "/tokenize":
        found: list[int] = answer.json()["tokens"]
        return found
    return list(server.engine.submitted[-1].prompt)


@pytest.mark.parametrize(("path", "body"), PLAIN)
def test_text_without_a_template_has_the_tokens_of_the_tokenizer(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    wanted = TOKENIZER.encode(TEXT, parse_special=True)
    assert (wanted.count(START), wanted.count(END)) == (2, 1)
    assert tokens(server, path, body) == wanted
    if path in ("/api/generate", "/v1/score"):  # whose dialects have no field for it
        return
    assert tokens(server, path, {**body, "parse_special": True, "add_special_tokens": True}) == wanted
    letters = tokens(server, path, {**body, "parse_special": False})
    of_ids = int("input" in body and isinstance(body["input"], list))
    assert (letters.count(START), letters.count(END)) == (of_ids, 0)
    assert len(letters) > len(wanted)


@pytest.mark.parametrize(("path", "body"), TEMPLATED)
def test_text_of_a_chat_stays_letters(server: Running, path: str, body: dict[str, Any]) -> None:
    found = tokens(server, path, body)
    assert (found.count(START), found.count(END)) == (2, 1)  # those of the template
    assert TOKENIZER.decode(found, skip_special_tokens=False).count("<|im_end|>") == 2


@pytest.mark.parametrize("server", [Embedding(judges_by=(5, 6), pooling="last")], indirect=True)
def test_text_that_is_ranked_through_the_template_stays_letters(server: Running) -> None:
    ranked = {"query": TEXT, "documents": [TEXT]}
    found = tokens(server, "/v1/rerank", ranked)
    plain = tokens(server, "/v1/rerank", {"query": "hi", "documents": ["hi"]})
    assert (found.count(START), found.count(END)) == (plain.count(START), plain.count(END))


def test_add_special_tokens_false_leaves_the_begin_token_out(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    encode = server.tokenizer.encode

    def spy(text: str, **options: Any) -> list[int]:
        asked.append(options["add_special_tokens"])
        return encode(text, **options)

    monkeypatch.setattr(server.tokenizer, "encode", spy)
    for path, body in PLAIN[:4]:
        for adds in (True, False):
            tokens(server, path, {**body, "add_special_tokens": adds})
            assert asked.pop() is adds


def test_echoed_prompt_with_log_probabilities_has_its_control_tokens(server: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "echo": True, "logprobs": 0}
    with server.client() as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].startswith(TEXT)
    scores = choice["logprobs"]
    places = [
        place for place, token in zip(scores["text_offset"], scores["tokens"], strict=True) if token == "<|im_start|>"
    ]
    assert places == [0, TEXT.rindex("<|im_start|>")]


def test_bad_word_may_be_a_control_token() -> None:
    assert TOKENIZER.spellings(["<|im_end|>"])[0] == (END,)
