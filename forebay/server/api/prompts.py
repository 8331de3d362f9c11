"""Token ids of prompts, and how the answers to them are read.

A chat's tools and thinking are checked against what the model's chat template can express of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

from forebay.base.errors import InvalidRequest, RequestError
from forebay.engine.client.choice import Reading
from forebay.requests.sampling_params import check_token_ids
from forebay.server.context import ServerContext
from forebay.server.protocol.messages import ChatMessage, Templated
from forebay.server.protocol.requests import ChatRequest, PlainText
from forebay.server.protocol.tools import INVALID_JSON
from forebay.server.protocol.validation import UNSUPPORTED_FIELD
from forebay.text.answers.formats import call_id_of
from forebay.text.answers.probes import Findings, Wanted
from forebay.text.answers.reading import reader_for
from forebay.text.answers.tools_as_text import HERMES, calls_in_text, tools_as_text, tools_described
from forebay.text.histories import adapted
from forebay.text.token_bytes import TokenBytes
from forebay.text.tokenizer import Tokenizer

T = TypeVar("T")
_NUMBER: Final = "number"  # of a client's message, while messages for the template are made of these


async def encode(server: ServerContext, text: str, body: PlainText) -> list[int]:
    """Return the tokens of a text, made by a worker if it is long. Raises what `Tokenizer.encode` raises."""
    server.tokenizer.wake()
    return await server.workers.run(
        server.client,
        server.tokenizer.encode,
        text,
        size=server.tokenizer.work_chars(text),
        add_special_tokens=body.add_special_tokens,
        parse_special=body.parse_special,
        max_tokens=server.engine.info.context_length,
    )


async def render(
    server: ServerContext, encode: Callable[..., T], messages: Sequence[ChatMessage], body: Templated, **options: Any
) -> T:
    """Render a conversation with `encode`, of the tokenizer. Templates always run in a worker."""
    server.tokenizer.wake()
    found = server.model.answers
    unread = unread_variables(server.tokenizer, body)
    variables = {name: value for name, value in body.template_variables.items() if name not in unread}
    said = [{**message.for_template(), _NUMBER: number} for number, message in enumerate(messages)]
    if "tools" in variables or any(message.keys() & {"tool_calls", "tool_call_id"} for message in said):
        said = for_template(said, variables, found)
    places = {message.pop(_NUMBER): place for place, message in enumerate(said) if _NUMBER in message}
    history = adapted(said, found.history)
    if points := options.pop("breakpoints", ()):
        options["breakpoints"] = [history.moved(point._replace(message=places[point.message])) for point in points]
    return await server.workers.run(
        server.client,
        encode,
        history.messages,
        size=1 << 20,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        max_tokens=server.engine.info.context_length,
        **options,
        **variables,
    )


def unread_variables(tokenizer: Tokenizer, body: Templated) -> list[str]:
    """Return the names of the client's own variables that the chat template does not read."""
    own = body.chat_template_kwargs.others if body.chat_template_kwargs else {}
    template = tokenizer.chat_template
    return [name for name in own if template is not None and name not in template.variables]


async def prompt_ids(server: ServerContext, body: PlainText, prompt: str | list[int], field: str) -> list[int]:
    """Return the token ids of a text, or check those that were sent in `field`."""
    if isinstance(prompt, str):
        return await encode(server, prompt, body)
    info = server.engine.info
    if len(prompt) <= info.context_length:  # a longer one is refused for that
        check_token_ids(field, prompt, info.vocab_size)
    return prompt


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Errors from below the protocol, where texts have no field, get it as their param."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or field
        raise


TAIL_TOKENS: Final = 16  # more than the tag that opens the thinking has


def check_answerable(body: ChatRequest, found: Findings) -> None:
    """Raises InvalidRequest for tools of a model whose calls nobody can read, and for what is said of thinking to a
    model that cannot be told."""
    if body.offered_tools and found.formats.calls is None:
        why = found.evidence.get("tool_calls", "there is no chat template")
        raise InvalidRequest(f"this model takes no tools: {why}", code=UNSUPPORTED_FIELD, param="tools")
    (wants, effort, field), thinks = body.requested_thinking, found.formats.thinking is not None
    if wants is not None and wants != thinks and not found.can_switch:
        what = "thinks before each answer" if thinks else "does not think"
        why = f"this model {what}, and its chat template knows no other way: leave {field} out"
        raise InvalidRequest(why, code=UNSUPPORTED_FIELD, param=field)
    if effort is not None and not found.has_efforts:
        what = "how much this model thinks cannot be chosen: its chat template knows no reasoning_effort, leave it out"
        raise InvalidRequest(what, code=UNSUPPORTED_FIELD, param="reasoning_effort")


def for_template(messages: list[dict[str, Any]], variables: dict[str, Any], found: Findings) -> list[dict[str, Any]]:
    """The messages as the chat template wants them, `variables` less what it does not read."""
    if not found.calls.as_text:
        messages = [_with_objects(message) for message in messages]
    if found.ignores_tools:
        tools = variables.pop("tools", [])
        if found.calls.hidden:
            return tools_as_text(messages, tools)
        messages = tools_described(messages, tools, found.calls.example)
    if found.calls.one_call:
        messages = one_call_each(messages)
    if found.wants_whole_tools and "tools" in variables:
        variables["tools"] = list(map(_whole, variables["tools"]))
    numbered = _numbered(messages, call_id_of(found.formats.calls))
    form = found.formats.calls or HERMES
    return [_as_wanted(message, found.calls, form) if "tool_calls" in message else message for message in numbered]


def one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with a message for each call, its result behind it, as models of a template that takes
    one call of a message would have called."""
    split: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        behind = place
        while behind < len(messages) and messages[behind]["role"] == "tool":
            behind += 1
        results, place = messages[place:behind], behind
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": message["role"], "content": None}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            split += [{**first, "tool_calls": [call]}, *own]
        ids = {call["id"] for call in calls}
        split += [result for result in results if result.get("tool_call_id") not in ids]
    return split


def _whole(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with what is optional: a description and parameters, whose properties are objects."""
    function = {"description": "", "parameters": {}, **tool["function"]}
    own = function["parameters"]
    properties = own.get("properties")
    members = properties.items() if isinstance(properties, dict) else ()
    whole = {"type": "object", **own, "properties": {name: _without_null(each) for name, each in members}}
    return {**tool, "function": {**function, "parameters": whole}}


def _without_null(schema: Any) -> dict[str, Any]:
    """Return a property's schema without words that are null; one that says nothing for any other value."""
    own = schema.items() if isinstance(schema, dict) else ()
    return {word: value for word, value in own if value is not None or word in ("const", "default")}


def _numbered(messages: list[dict[str, Any]], pattern: str) -> list[dict[str, Any]]:
    """With ids of calls that models were trained on, numbered through the conversation: templates refuse others, or
    show them to a model that then writes such."""
    ids: dict[str, str] = {}
    numbered = []
    for message in messages:
        calls = message.get("tool_calls", [])
        ids |= {call["id"]: pattern.format(len(ids) + i, **call["function"]) for i, call in enumerate(calls)}
        own = {"tool_calls": [{**call, "id": ids[call["id"]]} for call in calls]} if calls else {}
        result = message.get("tool_call_id")
        numbered.append({**message, **own, **({"tool_call_id": ids.get(result, result)} if result else {})})
    return numbered


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments that templates can iterate: text that is not a JSON object becomes a member of one."""
    calls = [
        {**call, "function": {**call["function"], "arguments": object_of(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def object_of(arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Return the arguments of a call as an object: a text that is no JSON becomes the value of `INVALID_JSON`."""
    return {INVALID_JSON: arguments} if isinstance(arguments, str) else arguments


def _as_wanted(message: dict[str, Any], wanted: Wanted, form: str) -> dict[str, Any]:
    if wanted.hidden:
        return calls_in_text(message, form)
    message = {**message, "content": wanted.content if message["content"] is None else message["content"]}
    if not wanted.as_text:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [_text_of(function["arguments"]) for function in functions]
    functions = [{**function, "arguments": text} for function, text in zip(functions, texts, strict=True)]
    calls = zip(message["tool_calls"], functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


def _text_of(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def reading_of(body: ChatRequest, found: Findings, tokenizer: Tokenizer, prompt: list[int]) -> Reading:
    """Return how the answers are read, of a chat with tools or a model that thinks."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.offered_tools}
    formats = found.formats if body.separate_reasoning else found.formats.with_thinking_said
    opened = found.opens_thinking(tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False))
    make = partial(reader_for, formats, tools, opened=opened and body.separate_reasoning)
    table = _shown(tokenizer.table, found.formats.spellings)
    one_call = body.parallel_tool_calls is False
    return Reading(make, table, one_call=one_call, with_thinking=body.include_reasoning)


@lru_cache(maxsize=8)
def _shown(table: TokenBytes, spellings: frozenset[str]) -> TokenBytes:
    return table.showing(spellings)
