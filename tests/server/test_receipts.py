"""A receipt names all that an answer was computed from, and repeats it (C31)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cli import verify_receipt
from forebay.cli.commands import run as forebay
from forebay.config.keys import all_keys, key_fields
from forebay.engine.frames import LoadedAdapter, Occupied
from forebay.text.tokenizer import Tokenizer
from forebay.verify.receipts import Stored, environment_changes, repeat
from forebay.verify.remote.server import Server
from tests import loopback
from tests.deadlines import HANGS_S
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.served import MODEL

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


# One of each form that a sampling parameter can have: a number, an object by token id, a list, a grammar.
SAMPLED = {
    **TEXT,
    "logit_bias": {"100": 5, "7": -1.5},
    "stop": ["end"],
    "bad_words": ["bad"],
    "logprobs": 2,
    "top_p": 0.5,
}
HELD = {**CHAT, "response_format": {"type": "json_object"}}


@pytest.mark.parametrize("body", [CHAT, TEXT, SAMPLED, HELD])
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


def test_key_whose_answers_have_receipts_gives_them_unless_the_request_says_otherwise(
    tokenizer: Tokenizer, tmp_path: Path, patience: None
) -> None:
    """Not of several choices, which have none."""
    file = tmp_path / "keys"
    file.write_text("sk-audited name=alice receipt=on\nsk-other-1 receipt=off\nsk-other-2\n")
    file.chmod(0o600)
    users, _ = all_keys({"api_key_file": str(file)})
    running = start(tokenizer, FakeEngine, **key_fields((users, ())))
    plain = {name: value for name, value in TEXT.items() if name != "receipt"}

    def has_receipt(key: str, body: dict[str, Any]) -> bool:
        with running.client() as http:
            answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return "receipt" in answer.json()["usage"]

    try:
        assert has_receipt("sk-audited", plain)
        assert not has_receipt("sk-audited", {**plain, "receipt": False})
        assert not has_receipt("sk-audited", {**plain, "n": 2})
        assert [has_receipt(key, plain) for key in ("sk-other-1", "sk-other-2")] == [False, False]
        assert has_receipt("sk-other-1", TEXT)
    finally:
        running.close()


def test_key_line_keeps_its_receipts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-audited receipt=on\n")
    (key,), _ = all_keys({"api_key_file": str(file)})
    file.write_text(key.line)
    assert all_keys({"api_key_file": str(file)})[0] == (key,)
    file.write_text("sk-audited receipt=yes\n")
    with pytest.raises(ConfigError, match="receipt='yes' is neither on nor off"):
        all_keys({"api_key_file": str(file)})


def test_receipt_with_a_model_is_repeated_by_a_server_with_these_settings(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, started = stored(server, {**CHAT, "model": MODEL.name}, tmp_path), []

    @contextmanager
    def served(values: dict[str, Any]) -> Iterator[str]:
        started.append(values)
        yield server.url

    monkeypatch.setattr(verify_receipt, "served", served)
    assert forebay(["verify", "--receipt", str(path), str(tmp_path), "--dtype=float32"]) == 0
    assert capsys.readouterr().out.strip() == "same"
    assert started == [{"served_model_name": MODEL.name, "model_path": str(tmp_path), "dtype": "float32"}]
    assert forebay(["verify", "--receipt", str(path), str(tmp_path), "--url", server.url]) == 2
    assert "give one of both" in capsys.readouterr().err


@pytest.mark.slow
def test_receipt_names_another_dtype_of_the_server_that_is_started_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three servers of a small model: the first answers, the second repeats, the third computes with another dtype."""
    model = str(tmp_path / "small")
    assert forebay(["models", "make", "--like", "llama", "--out", model, "--hidden-size", "64"]) == 0
    body, path = {**TEXT, "model": "small", "temperature": 1.0}, tmp_path / "answer.json"
    with verify_receipt.served({"model_path": model, "dtype": "float32"}) as url, loopback.client(base_url=url) as http:
        answer = http.post("/v1/completions", json=body, timeout=HANGS_S)
        assert answer.status_code == 200, answer.text
        path.write_text(json.dumps({"request": body, "answer": answer.json()}))
    capsys.readouterr()
    assert forebay(["verify", "--receipt", str(path), model, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip() == "same"
    assert forebay(["verify", "--receipt", str(path), model, "--dtype", "bfloat16"]) == 1
    assert "nothing was run" in capsys.readouterr().out
    assert forebay(["verify", "--receipt", str(path), str(tmp_path / "none")]) == 1
    assert "the server of the model ended before it answered, exit code" in capsys.readouterr().err


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


def test_receipt_names_the_weights_that_its_answer_began_with_and_the_server_those_of_its_last_update(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine, "occupied", Occupied(weight_version=1, weights="b2"))
    with server.client() as http:
        assert http.get("/server_info").json()["environment"]["weights"] == "b2"
    assert answered(server, CHAT)["usage"]["receipt"]["environment"]["weights"] == "a1"


def test_receipt_names_the_tensors_of_an_adapter_and_other_ones_differ(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest in ("ab", "cd"):
        loaded = LoadedAdapter(name="fine", number=1, path="", rank=1, num_bytes=1, num_users=0, digest=digest)
        monkeypatch.setattr(FakeEngine, "adapters", {"fine": loaded})
        if digest == "ab":
            path = stored(server, {**CHAT, "model": "fine"}, tmp_path)
    assert json.loads(path.read_text())["answer"]["usage"]["receipt"]["adapter_digest"] == "ab"
    assert repeated(path, server) == ["the adapter's tensors differ"]


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
