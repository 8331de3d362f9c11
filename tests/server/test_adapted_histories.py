"""Histories as clients write them, over HTTP: each is answered, and all of it is in the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forebay.text.answers.probes import find_formats
from tests.server.conftest import MODEL, start
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_server import ScriptedServer
from tests.text.test_histories import TEMPLATES
from tests.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer

FUNCTION: dict[str, Any] = {"name": "run", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "t1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
ASKED, USED = {"role": "user", "content": "Go."}, {"type": "tool_use", "id": "t1", "name": "run", "input": {}}
CALLED = {"role": "assistant", "content": [USED]}
MESSAGES_TOOL = {"name": "run", "input_schema": FUNCTION["parameters"]}
# What the template must be told beside the messages that the client sends.
_VARIABLES = "{{ '<kept>' if preserve_thinking }}{{ identity }}{% for d in documents or [] %}{{ d.title }}{% endfor %}"
_BARE = (
    "{% for t in tools or [] %}{{ '// ' + t.function.description }}"
    "{% for name, p in t.function.parameters.properties | items %}{{ name + (p.description or '') }}"
    "{{ 'text' if 'description' in p and p.description is not string and p.description + '' }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["Qwen 3.5", "Mistral", "Gemma 2", "MiniMax M2"])
def model(request: pytest.FixtureRequest, patience: None) -> Iterator[ScriptedServer]:
    template = TEMPLATES[request.param][0]
    if request.param == "Qwen 3.5":
        template = _VARIABLES + _BARE + template
    scripted = ScriptedServer(template)
    scripted.answer = "Well."
    scripted.name = request.param  # type: ignore[attr-defined]
    yield scripted
    scripted.server.close()


def ask(model: ScriptedServer, path: str, /, **body: Any) -> Any:
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    more = {"stream": False, "options": {"num_predict": 5}} if path == "/api/chat" else {limit: 5}
    with model.server.client() as client:
        return client.post(path, json={"model": "tiny", **more, **body})


def shown(model: ScriptedServer, path: str, **body: Any) -> str:
    answer = ask(model, path, **body)
    assert answer.status_code == 200, answer.text
    return model.prompt()


SYSTEMS = {
    "last": [ASKED, {"role": "system", "content": "Be brief."}],
    "between": [ASKED, {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Ok."}, ASKED],
    "behind an answer": [ASKED, {"role": "assistant", "content": "Ok."}, {"role": "system", "content": "Be brief."}],
    "first": [{"role": "system", "content": "Be brief."}, ASKED],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SYSTEMS)
def test_system_text_anywhere_is_in_the_prompt_of_every_dialect(model: ScriptedServer, name: str) -> None:
    head = [{"role": "system", "content": "Top."}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"messages": SYSTEMS[name], "system": "Top."}),
        ("/v1/chat/completions", {"messages": [*head, *SYSTEMS[name]]}),
        ("/v1/responses", {"input": SYSTEMS[name], "instructions": "Top."}),
        ("/api/chat", {"messages": [*head, *SYSTEMS[name]]}),
    ]
    for path, body in bodies:
        text = shown(model, path, **body)
        assert text.index("Top.") < text.index("Be brief.")
        assert "Go." in text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_result_of_a_tool_may_be_empty_in_every_dialect(model: ScriptedServer, content: dict[str, Any]) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", **content}
    turns = [ASKED, CALLED, {"role": "user", "content": [result]}]
    shown(model, "/v1/messages", messages=turns, tools=[MESSAGES_TOOL])
    told = {"role": "tool", "tool_call_id": "t1", **content}
    chat = [ASKED, {"role": "assistant", "content": [], "tool_calls": [CALL]}, told]
    shown(model, "/v1/chat/completions", messages=chat, tools=[TOOL])
    if content.get("content") is not None:
        item = {"type": "function_call", "call_id": "t1", "name": "run", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "t1", "output": content["content"]}
        shown(model, "/v1/responses", input=[ASKED, item, output], tools=[{"type": "function", **FUNCTION}])


@pytest.mark.parametrize("first", [True, False])
def test_text_beside_results_comes_behind_them(model: ScriptedServer, first: bool) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Done."}
    text = {"type": "text", "text": "And now?"}
    turns = [ASKED, CALLED, {"role": "user", "content": [text, result] if first else [result, text]}]
    prompt = shown(model, "/v1/messages", messages=turns, tools=[MESSAGES_TOOL])
    assert prompt.index("Done.") < prompt.index("And now?")
    later = [*turns, {"role": "assistant", "content": []}, ASKED]  # an answer without a word
    assert shown(model, "/v1/messages", messages=later, tools=[MESSAGES_TOOL]).count("Go.") == 2


def test_deferred_tools_are_in_the_prompt_and_found_by_name(model: ScriptedServer) -> None:
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "run"}]}
    turns = [ASKED, CALLED, {"role": "user", "content": [found]}]
    for defers in (True, False, None):
        prompt = shown(model, "/v1/messages", messages=turns, tools=[{**MESSAGES_TOOL, "defer_loading": defers}])
        assert "run" in prompt
    own = {"type": "function", **FUNCTION, "defer_loading": True}
    shown(model, "/v1/responses", input="Go.", tools=[own])
    refused = ask(model, "/v1/messages", messages=[ASKED], tools=[{**MESSAGES_TOOL, "defer_loading": 1}])
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"description": "d"},
        {"parameters": {"type": "object", "properties": {}}},
        {"parameters": {}},
        {"parameters": {"anyOf": [{"required": ["a"]}]}},
        {"parameters": {"properties": None, "required": None}},
        {"parameters": {"type": "object", "properties": {"a": True, "b": None, "c": {"description": None}, "d": {}}}},
    ],
)
def test_tool_without_what_is_optional_is_told_of(model: ScriptedServer, more: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now", **more}}]
    assert "now" in shown(model, "/v1/chat/completions", messages=[ASKED], tools=tools)


def test_variables_that_the_template_reads_are_given_to_it(model: ScriptedServer) -> None:
    wishes = {"preserve_thinking": True, "identity": "I am <|im_end|>", "documents": [{"title": "T1"}], "unread": 3}
    answer = ask(model, "/v1/chat/completions", messages=[ASKED], chat_template_kwargs=wishes)
    assert answer.status_code == 200, answer.text
    reads = model.name == "Qwen 3.5"  # type: ignore[attr-defined]
    prompt = model.prompt()
    assert prompt.startswith("<kept>I am <|im_end|>T1") == reads
    ignored = answer.headers["x-forebay-ignored"].split(", ")
    assert ignored == (["unread"] if reads else list(wishes))
    ends = model.server.engine.submitted[-1].prompt.count(model.server.tokenizer.eos_token_id)
    plain = ask(model, "/v1/chat/completions", messages=[ASKED])
    assert "x-forebay-ignored" not in plain.headers
    assert model.server.engine.submitted[-1].prompt.count(model.server.tokenizer.eos_token_id) == ends
    with model.server.client() as client:
        body = {"messages": [ASKED], "chat_template_kwargs": wishes}
        assert client.post("/apply-template", json=body).json()["prompt"] == prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [ASKED], "max_tokens": 8, "model": "tiny"}),
        ("/v1/responses", {"input": [ASKED]}),
    ],
)
def test_variables_are_given_to_the_template_on_every_route_of_chats(
    model: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    wishes = {"identity": "I am", "unread": 3}
    answer = ask(model, path, **body, chat_template_kwargs=wishes)
    assert answer.status_code == 200, answer.text
    reads = model.name == "Qwen 3.5"  # type: ignore[attr-defined]
    assert model.prompt().startswith("I am") == reads
    assert answer.headers["x-forebay-ignored"].split(", ") == (["unread"] if reads else list(wishes))
    answer = ask(model, path, **body, chat_template_kwargs={"messages": []})
    assert answer.status_code == 400
    assert "chat_template_kwargs.messages" in answer.text


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "max_tokens", "chat_template"]
)
def test_variable_of_the_server_is_refused_by_name(model: ScriptedServer, name: str) -> None:
    answer = ask(model, "/v1/chat/completions", messages=[ASKED], chat_template_kwargs={name: "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}")
    assert error["code"] == ("chat_template_refused" if name == "chat_template" else "unsupported_field")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["Qwen 2.5", "Mistral", "told in text"])
def test_mark_of_a_message_that_moved_ends_behind_the_marked_text(patience: None, name: str) -> None:
    """A state is kept there."""
    tokenizer = tiny_tokenizer(template=TEMPLATE if name == "told in text" else TEMPLATES[name][0])
    served = replace(MODEL, answers=find_formats(tokenizer))
    server = start(tokenizer, lambda: FakeEngine(wants_resume_points=True), model=served)
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Done."}
    marked = {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}
    turns = [ASKED, CALLED, {"role": "user", "content": [result, marked, {"type": "text", "text": "More."}]}]
    body = {"model": "tiny", "max_tokens": 1, "messages": turns, "tools": [MESSAGES_TOOL]}
    try:
        with server.client() as client:
            assert client.post("/v1/messages", json=body).status_code == 200
        prompt, points = server.engine.submitted[-1].prompt, server.engine.resume_points[-1]
        assert any(tokenizer.decode(prompt[:point]).endswith("And now?") for point in points)
    finally:
        server.close()


def test_history_that_cannot_be_adapted_names_the_rule_of_the_template(model: ScriptedServer) -> None:
    if model.name not in ("Mistral", "Gemma 2"):  # type: ignore[attr-defined]
        return
    messages = [{"role": "assistant", "content": "Hello."}, ASKED]
    error = ask(model, "/v1/chat/completions", messages=messages).json()["error"]
    assert (error["code"], error["param"]) == ("chat_template_error", "messages")
    assert "roles must alternate" in error["message"]
