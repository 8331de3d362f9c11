"""What is demanded of an answer is in it, whatever the model: over HTTP, of a real engine and a random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest
import torch
from llguidance import LLTokenizer

from forebay.grammar.matching import Grammars
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.answers.probes import find_formats
from forebay.text.tokenizer import Tokenizer
from tests import loopback
from tests.deadlines import HANGS_S
from tests.engine.conftest import make_chat_model
from tests.grammar.bombs import bombs
from tests.grammar.schemas import KINDS, schemas
from tests.integration.rig import Rig
from tests.integration.threaded import ThreadedEngine
from tests.kernels import NATIVE
from tests.server.conftest import MODEL, Running, start

CONTEXT = 2048
VOCAB = 258
END = 0
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["é", 'a "b"', None]}, "few": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "few"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "title": name}}} for name in ("get", "put")
]
ASK: Any = [{"role": "user", "content": "go"}]


@contextmanager
def serving(folder: Path, num_columns: int) -> Iterator[Running]:
    threads = torch.get_num_threads()
    rig = Rig(folder, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=CONTEXT)
    tokenizer = Tokenizer.from_path(folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def llguidance_tokenizer() -> LLTokenizer:
        return Vocabulary.of(tokenizer.table, [END], num_columns).tokenizer(encode)

    grammars = Grammars(llguidance_tokenizer, num_columns)
    core = rig.engine(num_tokens=4096, radix_cache=True, overlap_depth=1, grammars=grammars).core
    engine = ThreadedEngine(
        core, max_running_requests=16, context_length=CONTEXT, vocab_size=num_columns, eos_token_ids=[END]
    )
    running = start(tokenizer, engine.connect, model=replace(MODEL, answers=find_formats(tokenizer)))
    try:
        yield running
    finally:
        running.close()
        torch.set_num_threads(threads)
    assert engine.failure is None
    core.scheduler.audit()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_chat_model(tmp_path_factory.mktemp("model"), context_length=CONTEXT).path
    with serving(folder, VOCAB) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=HANGS_S) as client:
        yield client


def ask(api: openai.OpenAI, **wishes: Any) -> Any:
    more = {"stop_token_ids": [END], **wishes.pop("extra_body", {})}
    options = {"max_tokens": 300, "temperature": 1.5, "seed": 3, "extra_body": more, **wishes}
    return api.chat.completions.create(model="tiny", messages=ASK, **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_answers_have_the_form_that_was_asked_for(api: openai.OpenAI, streamed: bool) -> None:
    texts = ["", ""]
    if streamed:
        for chunk in ask(api, response_format=FORM, n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        choices = ask(api, response_format=FORM, n=2).choices
        assert {choice.finish_reason for choice in choices} == {"stop"}
        texts = [choice.message.content for choice in choices]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


@pytest.mark.parametrize(
    ("wishes", "names"),
    [
        ({"tool_choice": "required"}, {"get", "put"}),
        ({"tool_choice": {"type": "function", "function": {"name": "put"}}}, {"put"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get", "put"}),
    ],
)
def test_calls_that_must_be_made_are_made(api: openai.OpenAI, wishes: dict[str, Any], names: set[str]) -> None:
    (choice,) = ask(api, tools=TOOLS, **wishes).choices
    calls = choice.message.tool_calls
    if choice.finish_reason == "length":  # one more was begun
        calls.pop()
    assert calls
    assert len(calls) == 1 or wishes == {"tool_choice": "required"}
    for call in calls:
        assert call.function.name in names
        jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))
    assert choice.message.content is None


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_thinking_ends_at_its_budget_and_the_answer_follows(tmp_path: Path) -> None:
    """In both dialects, streamed and not, of a model that would not end it."""
    folder = make_chat_model(tmp_path, context_length=CONTEXT, template=THINKS, marks=["<think>", "</think>"]).path
    most: Any = {"model": "tiny", "messages": ASK, "max_tokens": 40, "temperature": 0}
    with serving(folder, VOCAB + 2) as running, loopback.client(base_url=running.url) as http:
        free = http.post("/v1/chat/completions", json=most).json()["choices"][0]["message"]
        assert not free["content"]
        for budget in (0, 9):
            asked = {**most, "max_thinking_tokens": budget}
            whole = http.post("/v1/chat/completions", json=asked).json()
            told = whole["choices"][0]["message"]
            # The end tag is one of the thinking's tokens.
            assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 1
            assert told["content"]
            assert len(told.get("reasoning_content") or "") <= budget
            assert bool(told.get("reasoning_content")) == (budget > 0)
            streamed = http.post("/v1/chat/completions", json={**asked, "stream": True}).text
            events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            for field in ("reasoning_content", "content"):
                assert "".join(delta.get(field) or "" for delta in deltas) == (told.get(field) or "")
        with anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0, timeout=HANGS_S) as api:
            thinking, coolest = {"type": "enabled", "budget_tokens": 9}, {"temperature": most.pop("temperature")}
            wished = {**most, "thinking": thinking, "extra_body": coolest}
            with api.messages.stream(**wished) as stream:
                message = stream.get_final_message()
            for one in (message, api.messages.create(**wished)):
                thought, said = one.content
                assert (thought.type, said.type) == ("thinking", "text")
                assert (thought.thinking, said.text) == (told["reasoning_content"], told["content"])


CHUNKS = [pytest.param(i, marks=[] if i == 0 else [pytest.mark.slow]) for i in range(10)]


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_whole_answers_are_valid_by_schemas_of_every_kind(server: Running, chunk: int) -> None:
    """All at once, greedy and sampled, two of each."""
    asked = schemas()[chunk * len(KINDS) : (chunk + 1) * len(KINDS)]
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "x", "max_retries": 0, "timeout": HANGS_S}
    async with openai.AsyncOpenAI(**options) as api:

        async def answers(number: int, schema: dict[str, Any]) -> list[Any]:
            form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
            more = {"max_tokens": 150, "temperature": number % 2, "seed": number, "n": 2}
            stops = {"stop_token_ids": [END]}
            answer = await api.chat.completions.create(
                model="tiny", messages=ASK, response_format=form, extra_body=stops, **more
            )
            return answer.choices

        found = await asyncio.gather(*(answers(i, schema) for i, schema in enumerate(asked)))
    num_whole = 0
    for schema, choices in zip(asked, found, strict=True):
        for choice in choices:
            if choice.finish_reason == "stop":
                num_whole += 1
                jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(
                    json.loads(choice.message.content)
                )
    assert num_whole > len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_stream_goes_on_beside_bombs(server: Running, stride: int) -> None:
    """Each is refused, or does no harm."""
    dropped = [bomb for bomb in bombs() if bomb.kind is not GrammarKind.CHOICE][::stride]
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "x", "max_retries": 0, "timeout": HANGS_S}
    async with openai.AsyncOpenAI(**options) as api:
        free = {"model": "tiny", "max_tokens": 300, "seed": 1, "extra_body": {"ignore_eos": True}}
        alone = await api.completions.create(prompt="go", **free)
        names = {GrammarKind.JSON_SCHEMA: "guided_json", GrammarKind.REGEX: "guided_regex"}

        async def drop(bomb: Grammar) -> str:
            field = names.get(bomb.kind, "guided_grammar")
            more = {field: bomb.text, "stop_token_ids": [END]}
            try:
                await api.completions.create(model="tiny", prompt="go", max_tokens=4, extra_body=more)
            except openai.APIStatusError as error:
                return str(error.code)
            return "taken"

        together, *outcomes = await asyncio.gather(
            api.completions.create(prompt="go", **free), *(drop(bomb) for bomb in dropped)
        )
    assert together.choices[0].text == alone.choices[0].text
    assert "grammar_invalid" in outcomes
    # Checks of all the bombs at once may wait too long for a free worker on a busy machine.
    assert set(outcomes) <= {"grammar_invalid", "queue_full", "taken"}


def test_what_cannot_be_enforced_is_refused_by_its_field(api: openai.OpenAI) -> None:
    (tool, *_), bad = TOOLS, {"type": "object", "properties": {"a": {"type": "strin"}}}
    strict = {**tool, "function": {"name": "f", "parameters": bad, "strict": True}}
    for wishes, param in (
        ({"tools": [tool, strict]}, "tools.1.function.parameters"),
        ({"tools": [tool, named(bad)], "tool_choice": "required"}, "tools.1.function.parameters"),
        (
            {"response_format": {**FORM, "json_schema": {"name": "n", "schema": bad}}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(api, **wishes)
        assert (refused.value.code, refused.value.param) == ("grammar_invalid", param)


def named(schema: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


# What tool servers publish, of which no grammar can be made.
NOT_COMPILABLE: dict[str, Any] = {
    "look-ahead": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!tmp).*$"}}},
    "back reference": {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}},
    "dangling": {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}, "required": ["a"]},
    "remote": {"$ref": "https://example.com/schema.json"},
    "any": {"type": "object", "properties": {"a": {"type": "any"}, "b": {"type": None}}},
    "not a schema": {"type": "object", "properties": None, "required": {}},
    "a flag as a schema": {"type": "object", "properties": {"a": {"minimum": "0"}, "b": 5}, "required": True},
    "more than can be": {"not": {"required": ["b"]}, "if": {"minProperties": 1}, "unevaluatedProperties": False},
}


@pytest.mark.parametrize("name", NOT_COMPILABLE)
def test_schema_of_a_tool_is_compiled_only_if_the_tool_is_enforced(api: openai.OpenAI, name: str) -> None:
    """Also beside a tool that is."""
    bad, beside = (
        named(NOT_COMPILABLE[name]),
        {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
    )
    for tools in ([bad], [beside, bad], [named(NOT_COMPILABLE[name], strict=False)]):
        assert ask(api, tools=tools, max_tokens=5).choices[0].finish_reason in ("stop", "length", "tool_calls")
    for tool, choice in (
        (bad, "required"),
        (named(NOT_COMPILABLE[name], strict=False), {"type": "function", "function": {"name": "f"}}),
        (named(NOT_COMPILABLE[name], strict=True), "auto"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(api, tools=[tool], tool_choice=choice)
        assert (refused.value.code, refused.value.param) == ("grammar_invalid", "tools.0.function.parameters")


@pytest.mark.quick(1)
@pytest.mark.parametrize("strict", [None, False, True])
def test_call_that_must_be_made_keeps_its_schema_whatever_strict_says(api: openai.OpenAI, strict: bool | None) -> None:
    tools = [named(SCHEMA, **({} if strict is None else {"strict": strict}))]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (made,) = ask(api, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices
        (call,) = made.message.tool_calls
        jsonschema_rs.validate(SCHEMA, json.loads(call.function.arguments))
