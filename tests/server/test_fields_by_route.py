"""Each field of sampling and output has one fate on each route, and the table of the guide says which."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.base import foreign
from forebay.base.foreign import why_field_is_absent
from forebay.server.api.fields_by_route import BODIES, Fate, fate, fields, rows
from forebay.server.protocol.requests import Choosing
from forebay.server.protocol.strict import body_types
from tests.server.conftest import Running
from tests.server.scripted_server import ScriptedServer
from tests.text.answers.templates import QWEN3

HI: list[Any] = [{"role": "user", "content": "hi"}]
CONTENT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": HI, "max_tokens": 2, "model": "tiny"},
    "/completion": {"prompt": "a", "n_predict": 2},
}
VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_k": 5,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "stop": ["x"],
    "stop_regex": ["x+"],
    "stop_sequences": ["x"],
    "repeat_last_n": -1,
    "repeat_penalty": 1.1,
    "stop_token_ids": [5],
    "bad_words": ["q"],
    "allowed_token_ids": [5, 6],
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "json_object", "schema": {"type": "object"}},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "json_schema": {"type": "object"},
    "grammar": 'start: "a"',
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "verbosity": "low",
    "thinking": False,
    "user": "u",
    "safety_identifier": "u",
    "prompt_cache_key": "u",
    "prompt_cache_retention": "24h",
    "cache_salt": "u",
    "request_id": "u",
    "suffix": "u",
    "modalities": ["text"],
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "skip_special_tokens": True,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "n_predict": 3,
    "nvext": {},
    "cache_control": {"type": "ephemeral"},
}
ALSO: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
COUNTS = (
    "seed",
    "min_tokens",
    "priority",
    "n",
    "prompt_logprobs",
    "top_logprobs",
    "best_of",
    "max_thinking_tokens",
    "n_probs",
)


def _value(name: str, path: str) -> Any:
    own = {("logprobs", "/v1/completions"): 1, ("thinking", "/v1/messages"): {"type": "disabled"}}
    if (name, path) in own:
        return own[name, path]
    return VALUES.get(name, 1 if name in COUNTS else "u" if fate(BODIES[path], name) is Fate.PASSED else False)


def _answer(http: httpx.Client, path: str, name: str) -> tuple[httpx.Response, Any]:
    length = {"max_tokens", "max_completion_tokens", "n_predict"}
    body = dict(CONTENT[path])
    if name in length and fate(BODIES[path], name) is Fate.TAKEN:
        body = {key: value for key, value in body.items() if key not in length or (path, key) == ("/v1/messages", name)}
    extra = ALSO.get(name, {}) if fate(BODIES[path], name) is Fate.TAKEN and path != "/v1/responses" else {}
    value = _value(name, path)
    return http.post(path, json={**body, name: value, **extra}), value


@pytest.fixture(scope="module")
def server(patience: None) -> Iterator[Running]:
    speaker = ScriptedServer(QWEN3)
    speaker.answer = "hello"
    yield speaker.server
    speaker.server.close()


@pytest.mark.quick(2)
@pytest.mark.parametrize("path", BODIES)
def test_table_of_fields_is_what_requests_show(server: Running, path: str) -> None:
    with server.client() as http:
        for name, fates in rows():
            answer, value = _answer(http, path, name)
            ignored = answer.headers.get("x-forebay-ignored", "").split(", ")
            if fates[path] is Fate.REFUSED:
                assert answer.status_code == 400, (name, value, answer.text)
                told = answer.json()["error"]
                assert f"unknown field '{name}': " in told["message"], told  # with a reason
                continue
            if fates[path] is Fate.NEUTRAL:
                for neutral in BODIES[path].ignored[name].schema.get("enum", [None]):
                    assert http.post(path, json={**CONTENT[path], name: neutral}).status_code == 200, (name, neutral)
                continue
            if name in ("reasoning_effort", "verbosity", "max_thinking_tokens"):
                continue  # this template knows no levels, and this vocabulary no tag of thinking: the answer says so
            assert answer.status_code == 200, (name, value, answer.text)
            assert (name in ignored) == (fates[path] is Fate.PASSED), (name, ignored)


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_choose_tokens_have_the_same_effect_on_every_route(server: Running, path: str) -> None:
    sent = {
        "min_p": 0.25,
        "top_k": 7,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 1,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "stop_regex": ["zz+"],
        "logit_bias": {"5": 1.0},
        "bad_words": ["qq"],
        "allowed_token_ids": list(range(300)),
    }
    with server.client() as http:
        answer = http.post(path, json={**CONTENT[path], **sent})
    assert answer.status_code == 200, answer.text
    params = server.engine.submitted[-1].params
    assert (params.min_p, params.top_k, params.seed, params.min_tokens) == (0.25, 7, 11, 1)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.5, 0.25, 1.5)
    assert 9 in params.stop_token_ids
    assert params.logit_bias


def test_every_route_takes_what_chooses_tokens_and_every_refusal_has_a_reason() -> None:
    for name in Choosing.names():
        assert {fate(body, name) for body in BODIES.values()} == {Fate.TAKEN}, name
    refused = {(name, path) for name in fields() for path, body in BODIES.items() if fate(body, name) is Fate.REFUSED}
    assert not {name for name, _ in refused if not why_field_is_absent(name)}


def test_every_field_that_the_file_declares_belongs_to_a_body() -> None:
    bodies = [*body_types()]
    neutral = {name for body in bodies for name in body.ignored}
    passed = {name for body in bodies for name in body.passed}
    fields = tomllib.loads(Path(foreign.__file__).with_suffix(".toml").read_text())["fields"]
    assert {name for values in fields["neutral"].values() for name in values} <= neutral
    assert {name for names in fields["passed"].values() for name in names} <= passed


@pytest.mark.parametrize("path", BODIES)
def test_null_of_a_field_that_is_elsewhere_asks_for_nothing(server: Running, path: str) -> None:
    with server.client() as http:
        body = {**CONTENT[path], "lora_path": None, "documents": None, "repeat_penalty": None}
        assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object", "schema": {"const": "ok"}}},
        {"response_format": {"type": "json_schema", "schema": {"const": "ok"}}},
        {"json_schema": {"const": "ok"}},
        {"json_schema": json.dumps({"const": "ok"})},
    ],
)
def test_schemas_in_llama_servers_words_are_enforced_on_every_route(server: Running, asked: dict[str, Any]) -> None:
    with server.client() as http:
        for path, content in CONTENT.items():
            assert http.post(path, json={**content, **asked}).status_code == 200
            grammar = server.engine.submitted[-1].params.grammar
            assert grammar is not None
            assert '"ok"' in grammar.text.replace("\\", "")


def test_two_fields_that_say_what_the_answer_looks_like_are_refused_on_every_route(server: Running) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {}}
    both = {"grammar": 'start: "a"', "guided_regex": "a"}
    cases = [(path, both) for path in BODIES]
    cases += [("/v1/responses", {"grammar": 'start: "a"', "text": {"format": schema}})]
    cases += [
        ("/v1/messages", {"grammar": 'start: "a"', "output_config": {"format": {"type": "json_schema", "schema": {}}}})
    ]
    with server.client() as http:
        for path, asked in cases:
            answer = http.post(path, json={**CONTENT[path], **asked})
            assert (answer.status_code, "send one of them" in answer.text) == (400, True), answer.text


def test_thinking_of_messages_may_be_asked_for_by_a_variable_and_not_contradicted(server: Running) -> None:
    with server.client() as http:

        def prompt(**more: Any) -> list[int]:
            answer = http.post("/v1/messages", json={**CONTENT["/v1/messages"], **more})
            assert answer.status_code == 200, answer.text
            found: list[int] = server.engine.submitted[-1].prompt
            return found

        on, off = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))
        wanted, unwanted = prompt(thinking={"type": "adaptive"}), prompt()
        assert wanted != unwanted
        assert (prompt(**on), prompt(**off)) == (wanted, unwanted)
        body = {**CONTENT["/v1/messages"], "thinking": {"type": "disabled"}, **on}
        refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "chat_template_kwargs say otherwise" in refused.text
