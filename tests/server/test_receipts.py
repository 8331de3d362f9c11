"""A receipt names all that an answer was computed from, and repeats it (C31)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cli.commands import run as forebay
from forebay.verify.receipts import Stored, environment_changes, repeat
from forebay.verify.remote.server import Server
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 4, "receipt": True}
TEXT = {"prompt": "hello world", "max_tokens": 4, "receipt": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(tokenizer, patience: None) -> Iterator[Running]:
    running = start(tokenizer, FakeEngine)
    environment = {"weights": "a1", "kernels": "native avx2", "draft weights": ""}
    running.engine.info = msgspec.structs.replace(running.engine.info, environment=environment)
    yield running
    running.close()


def answered(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    with server.client() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stored(server: Running, body: dict[str, Any], folder: Path) -> Path:
    path = folder / "answer.json"
    path.write_text(json.dumps({"request": body, "answer": answered(server, body)}))
    return path


def repeated(path: Path, server: Running) -> list[str]:
    async def ask() -> list[str]:
        found = await Server.find(server.url, None, "")
        try:
            return await repeat(Stored.read(path), found)
        finally:
            await found.aclose()

    return asyncio.run(ask())


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_receipt_of_an_answer_repeats_it(server: Running, body: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = stored(server, body, tmp_path)
    receipt = json.loads(path.read_text())["answer"]["usage"]["receipt"]
    assert receipt["environment"] == {**server.engine.info.environment, "template": server.tokenizer.template_digest}
    sent = server.engine.submitted[-1]
    assert receipt["output_ids"] == server.engine.script(sent.prompt, sent.params)
    assert forebay(["verify", "--receipt", str(path), "--url", server.url]) == 0
    assert capsys.readouterr().out.strip() == "same"


def test_receipt_names_the_seed_that_was_drawn(server: Running) -> None:
    seeds = [answered(server, TEXT | {"temperature": 1.0})["usage"]["receipt"]["seed"] for _ in range(2)]
    assert seeds == [stream.params.seed for stream in server.engine.submitted[-2:]]
    assert len({*seeds, -1}) == 3
    assert answered(server, TEXT | {"seed": 5})["usage"]["receipt"]["seed"] == 5


def test_receipt_has_no_text_of_prompt_or_answer(server: Running) -> None:
    answer = answered(server, CHAT)
    written = json.dumps(answer["usage"]["receipt"])
    assert "hello" not in written
    assert answer["choices"][0]["message"]["content"] not in written


def test_answer_without_the_field_has_no_receipt(server: Running) -> None:
    assert "receipt" not in answered(server, {**CHAT, "receipt": False})["usage"]


def test_receipt_of_a_stream_is_in_its_usage(server: Running) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "seed": 1}
    with server.client() as http:
        lines = http.post("/v1/chat/completions", json=body).text.splitlines()
    last = json.loads([line for line in lines if '"usage":{' in line][-1].removeprefix("data: "))
    assert last["usage"]["receipt"] == answered(server, {**CHAT, "seed": 1})["usage"]["receipt"]


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_receipt_of_several_choices_is_refused(server: Running, several: dict[str, Any]) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={**TEXT, **several})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "receipt")


def test_repeat_names_the_first_token_that_differs(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, script = stored(server, CHAT, tmp_path), server.engine.script
    receipt = json.loads(path.read_text())["answer"]["usage"]["receipt"]

    def other(*args: Any) -> Any:
        tokens = list(script(*args))
        return [*tokens[:2], tokens[2] + 1, *tokens[3:]]

    monkeypatch.setattr(server.engine, "script", other)
    then = receipt["output_ids"][2]
    assert repeated(path, server) == [f"same until token 2: token id {then} then, token id {then + 1} now"]


@pytest.mark.parametrize("part", ["weights", "kernels", "template"])
def test_repeat_runs_nothing_if_what_computes_differs(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    path = stored(server, CHAT, tmp_path)
    info = server.engine.info
    if part == "template":
        monkeypatch.setattr(server.tokenizer, "template_digest", "b2")
    else:
        changed = msgspec.structs.replace(info, environment={**info.environment, part: "b2"})
        monkeypatch.setattr(server.engine, "info", changed)
    before = len(server.engine.submitted)
    line, why = repeated(path, server)
    assert line.startswith(f"{part}: ")
    assert line.endswith("then, b2 now")
    assert "nothing was run" in why
    assert len(server.engine.submitted) == before


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"messages": [{"role": "user", "content": "hello there"}]}, ["the prompt's tokens differ"]),
        ({"temperature": 0.5}, ["the sampling parameters differ"]),
    ],
)
def test_repeat_of_another_request_names_what_differs(
    server: Running, tmp_path: Path, change: dict[str, Any], found: list[str]
) -> None:
    path = stored(server, CHAT, tmp_path)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "request": whole["request"] | change}))
    assert repeated(path, server) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: [], "a JSON object"),
        (lambda whole: {"request": whole["request"]}, "a JSON object"),
        (lambda whole: {**whole, "answer": {}}, "has no receipt in its usage"),
        (lambda whole: whole["answer"]["usage"]["receipt"].update(receipt_format=9), "format 9; read is 1"),
        (lambda whole: whole["answer"]["usage"]["receipt"].update(seed=9), "was changed"),
        (lambda whole: whole["answer"]["usage"]["receipt"]["output_ids"].pop(), "was changed"),
    ],
)
def test_file_that_has_no_whole_receipt_is_refused(
    server: Running, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    path = stored(server, CHAT, tmp_path)
    whole = json.loads(path.read_text())
    changed = change(whole)
    path.write_text(json.dumps(whole if changed is None or isinstance(changed, int) else changed))
    with pytest.raises(ConfigError, match=said):
        Stored.read(path)


def test_changes_of_an_environment_name_what_only_one_has() -> None:
    assert environment_changes({"a": "1", "b": ""}, {"a": "1", "c": "2"}) == ["c: none then, 2 now"]
