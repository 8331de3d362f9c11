"""Conversations of two coding clients, replayed: bodies as they send them, and the events in the order they wait for.

Written after the clients' public protocol; the texts are made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.server.test_tools import Speaker
from tests.text.answers.templates import QWEN3_THINKING

MARK = {"type": "ephemeral"}
THOUGHT = "I look first.</think>"
WORDS = "Let me look."
RESULT = "1\tdef main() -> None:\n"


def call(**arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'Read', 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[Speaker]:
    speaker = Speaker(QWEN3_THINKING)
    yield speaker
    speaker.server.close()


def ask(model: Speaker, path: str, headers: dict[str, str], body: dict[str, Any], answer: str) -> list[dict[str, Any]]:
    """The events, each with the name that its line gives it."""
    model.answer = answer
    with model.server.client(headers=headers) as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def order(events: list[dict[str, Any]], place: str) -> list[tuple[str, Any]]:
    """Kinds of events in a row, each once, and whose they are."""
    return [key for key, _ in groupby((event["type"].removeprefix("response."), event.get(place)) for event in events)]


# -- a client of /v1/messages --------------------------------------------------------------------------------------

CLAUDE_HEADERS = {
    "authorization": "Bearer any",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/2.1.332 (external, cli)",
    "x-app": "cli",
}
CLAUDE_TOOLS = [
    {
        "name": name,
        "description": f"{name} something.",
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"file_path": {"type": "string"}},
            "required": ["file_path"],
            "additionalProperties": False,
        },
    }
    for name in ("Read", "Bash", "mcp__docs__search")
]


def claude_body(messages: list[Any], nonce: str) -> dict[str, Any]:
    header = f"x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={nonce};"
    return {
        "model": "tiny",
        "messages": messages,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are a coding agent.", "cache_control": MARK},
            {"type": "text", "text": "\nBe brief.", "cache_control": MARK},
        ],
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},  # of 2.1.332
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def test_a_client_of_messages_reads_a_file_and_answers(model: Speaker) -> None:
    reminder = {"type": "text", "text": "<system-reminder>\nNothing new.\n</system-reminder>"}
    messages: list[Any] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "Read main.py", "cache_control": MARK}]}
    ]
    events = ask(
        model,
        "/v1/messages?beta=true",
        CLAUDE_HEADERS,
        claude_body(messages, "a1b2c"),
        THOUGHT + WORDS + call(file_path="a.py") + call(file_path="b.py"),
    )
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order(events, "index") == [
        ("message_start", None),
        *((kind, index) for index in range(4) for kind in block),
        ("message_delta", None),
        ("message_stop", None),
    ]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [each["type"] for each in begun] == ["thinking", "text", "tool_use", "tool_use"]
    assert (events[-2]["delta"]["stop_reason"], events[0]["message"]["stop_reason"]) == ("tool_use", None)
    content = [
        {"type": "thinking", "thinking": "I look first.", "signature": "unsigned"},
        {"type": "text", "text": WORDS},
        *({**each, "input": {"file_path": name}} for each, name in zip(begun[2:], ("a.py", "b.py"), strict=True)),
    ]
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": RESULT} for each in begun[2:]]
    results[-1] |= {"is_error": False, "cache_control": MARK}
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    first = model.prompt()
    events = ask(
        model, "/v1/messages?beta=true", CLAUDE_HEADERS, claude_body(messages, "d3e4f"), "</think>It is empty."
    )
    assert [kind for kind, _ in order(events, "index")] == ["message_start", *block, "message_delta", "message_stop"]
    spelled = model.prompt()
    assert spelled.count(RESULT) == 2
    assert spelled[: spelled.index("Be brief.")] == first[: first.index("Be brief.")]  # what is before is the same
    with model.server.client(headers=CLAUDE_HEADERS) as http:
        asked = {
            name: claude_body(messages, "d3e4f")[name] for name in ("model", "messages", "system", "tools", "thinking")
        }
        counted = http.post("/v1/messages/count_tokens?beta=true", json=asked).json()["input_tokens"]
    assert counted == len(model.server.engine.submitted[-1].prompt)


# -- a client of /v1/responses -------------------------------------------------------------------------------------

CODEX_HEADERS = {
    "authorization": "Bearer any",
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "session_id": "0198c0de-0000-7000-8000-000000000000",
    "user-agent": "codex_cli_rs/0.100.0",
}


PATCH = 'start: "*** Begin Patch" LF line+ "*** End Patch"\nline: "+" /(.*)/ LF\n%import common.LF\n'


def codex_body(items: list[Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"file_path": {"type": "string"}}, "additionalProperties": False}
    return {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [
            {"type": "function", "name": "Read", "description": "Reads.", "strict": False, "parameters": schema},
            {"type": "web_search", "external_web_access": False},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198c0de-0000-7000-8000-000000000000",
        "client_metadata": {"installation": "0198c0de"},
    }


def text_item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@pytest.mark.slow
def test_a_client_of_responses_reads_a_file_and_answers(model: Speaker) -> None:
    items = [text_item("developer", "Sandboxed."), text_item("user", "<cwd>/</cwd>"), text_item("user", "Read main.py")]
    said = THOUGHT + WORDS + call(file_path="a.py") + call(file_path="b.py")
    events = ask(model, "/v1/responses", CODEX_HEADERS, codex_body(items), said)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    def written(kind: str, index: int) -> list[tuple[str, int]]:
        part = [] if kind == "function_call_arguments" else ["content_part"]
        names = ["output_item.added", *(f"{name}.added" for name in part), f"{kind}.delta", f"{kind}.done"]
        return [(name, index) for name in (*names, *(f"{name}.done" for name in part), "output_item.done")]

    kinds = ["reasoning_text", "output_text", "function_call_arguments", "function_call_arguments"]
    assert order(events, "output_index") == [
        ("created", None),
        ("in_progress", None),
        *(each for index, kind in enumerate(kinds) for each in written(kind, index)),
        ("completed", None),
    ]
    assert events[-1]["response"]["metadata"] == {"ignored": "web_search"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    reasoning, *others = done
    assert reasoning["encrypted_content"]
    items += [{**reasoning, "content": None}, *others]  # the client reads what thinking says, and hands back the seal
    calls = [item for item in others if item["type"] == "function_call"]
    items += [{"type": "function_call_output", "call_id": item["call_id"], "output": RESULT} for item in calls]
    events = ask(model, "/v1/responses", CODEX_HEADERS, codex_body(items), "</think>It is empty.")
    assert order(events, "output_index")[2:-1] == written("output_text", 0)
    spelled = model.prompt()
    assert spelled.count(RESULT) == 2
    assert spelled.index("You are a coding agent.") < spelled.index("Sandboxed.") < spelled.index("Read main.py")
