"""Loops of current clients, whose calls of tools are cut off and go back with all that was received.

The clients of Python and of JavaScript that the project does not need otherwise are those of `make clients`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests import loopback
from tests.deadlines import HANGS_S
from tests.integration.clients.install import installed
from tests.integration.tree import Tree, serving

MODEL = "SmolLM2-135M-Instruct"
CLIENTS = Path(__file__).parent / "clients"
CUT_OFF = 22  # tokens: less than a call with its arguments has
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = "How is the weather in Paris?"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("agents")
    flags = ("--dtype=float32", "--context-length=4096", "--kv-cache-bytes=256MiB")
    with serving(folder / "tree", embedded_model, *flags) as started:
        yield started


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.slow
def test_openai_chat_cut_off_call_goes_back_and_is_answered(tree: Tree) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with loopback.client() as http, openai.OpenAI(
        base_url=f"{tree.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S, http_client=http
    ) as api:  # fmt: skip
        cut_off = []
        for max_tokens, choice in ((CUT_OFF, "required"), (60, "required"), (20, "none")):
            asked: Any = {"tools": tools, "tool_choice": choice, "max_tokens": max_tokens, "temperature": 0}
            message = api.chat.completions.create(model=MODEL, messages=messages, **asked).choices[0].message
            calls = message.tool_calls or []
            cut_off += [not is_object(call.function.arguments) for call in calls]  # type: ignore[union-attr]
            messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in calls)]
            messages.append({"role": "user", "content": "And now?"})
    assert cut_off[0]
    assert messages[-2].content


@pytest.mark.slow
def test_openai_responses_cut_off_call_goes_back_and_is_answered(tree: Tree) -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": ASKED}]
    with loopback.client() as http, openai.OpenAI(
        base_url=f"{tree.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S, http_client=http
    ) as api:  # fmt: skip
        cut_off = []
        for max_tokens, choice in ((CUT_OFF, "required"), (60, "required"), (20, "none")):
            asked: Any = {"tools": tools, "tool_choice": choice, "max_output_tokens": max_tokens, "temperature": 0}
            answer = api.responses.create(model=MODEL, input=items, **asked)
            calls = [item for item in answer.output if item.type == "function_call"]
            cut_off += [not is_object(call.arguments) for call in calls]
            results = ({"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls)
            items += [*answer.output, *results, {"role": "user", "content": "And now?"}]
    assert cut_off[0]
    assert answer.output_text


@pytest.mark.slow
def test_anthropic_cut_off_call_goes_back_and_is_answered(tree: Tree) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with anthropic.Anthropic(base_url=tree.url, api_key="none", max_retries=0, timeout=HANGS_S) as api:
        for max_tokens, choice in ((CUT_OFF, "any"), (60, "any"), (20, "none")):
            asked: Any = {
                "tools": tools,
                "tool_choice": {"type": choice},
                "max_tokens": max_tokens,
                "extra_body": {"temperature": 0},
            }
            answer = api.messages.create(model=MODEL, messages=messages, **asked)
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]})
    assert answer.content[0].text


def run(*command: str | Path, cwd: Path, limit_s: float) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.clients
@pytest.mark.slow
def test_openai_agents_and_pydantic_ai_go_on_after_a_cut_off_call(tree: Tree) -> None:
    folder = installed("agents")
    script = CLIENTS / "cut_off_loops.py"
    told = json.loads(run(folder / "bin/python", script, tree.url, MODEL, cwd=folder, limit_s=HANGS_S * 4))
    assert {name.partition(" ")[0] for name in told} == {"openai-agents", "pydantic-ai"}
    assert len(told) == 5
    assert min(told.values()) >= 2


@pytest.mark.clients
@pytest.mark.slow
def test_vercel_ai_sdk_goes_on_after_a_cut_off_call(tree: Tree) -> None:
    folder = installed("node")
    shutil.copy(CLIENTS / "cut_off_loops.mjs", folder)
    node = folder / "node_modules/.bin/node"
    told = json.loads(run(node, "cut_off_loops.mjs", tree.url, MODEL, cwd=folder, limit_s=HANGS_S * 4))
    assert len(told) == 8
    assert min(told.values()) >= 3
