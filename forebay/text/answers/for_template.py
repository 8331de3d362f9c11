"""Messages with calls, results and tools as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.text.answers.formats import call_id_of
from forebay.text.answers.probes import Findings, Wanted
from forebay.text.answers.tools_as_text import (
    GLM4,
    HERMES,
    called_by_metadata,
    calls_in_text,
    tools_as_text,
    tools_described,
)

INVALID_JSON: Final = "invalid_json"  # the key of arguments that are not a JSON object


def whole_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its optional fields: a content, and for each call an id and arguments as an object, parsed
    if they are a text of one. Raises InvalidRequest for a call without a name."""
    whole: dict[str, Any] = {"content": None if message.get("tool_calls") else "", **message}
    calls = whole.pop("tool_calls", None) or []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"call {number} of a message has no function.name: {call!r:.80}", param="tool_calls")
    return {**whole, "tool_calls": [_whole_call(call, i) for i, call in enumerate(calls)]} if calls else whole


def _whole_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments or "{}")
        except ValueError:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {"id": f"call{number}", "type": "function", **call, "function": {**call["function"], "arguments": arguments}}


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
    return _with_calls(messages, found)


def _with_calls(messages: list[dict[str, Any]], found: Findings) -> list[dict[str, Any]]:
    """Return the messages with calls as the template shows them, or as text if it shows none."""
    form = found.formats.calls or HERMES
    if found.calls.hidden and form == GLM4:
        return called_by_metadata(messages)
    numbered = _numbered(messages, call_id_of(found.formats.calls))
    return [_as_wanted(message, found.calls, form) if "tool_calls" in message else message for message in numbered]


def one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with a message for each call, its result behind it, as models of a template that takes
    one call of a message would have called."""
    split: list[dict[str, Any]] = []
    for answer, results in _answers(messages):
        calls = [call["id"] for message in answer for call in message.get("tool_calls", ())]
        if len(calls) < 2:
            split += [*answer, *results]
            continue
        for message in answer:
            split += _each_call(message, results)
        split += [result for result in results if result.get("tool_call_id") not in calls]
    return split


def _answers(messages: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield each run of messages of one role that is no tool's, with the results of tools behind it."""
    answer: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        if results or (answer and answer[-1]["role"] != message["role"]):
            yield answer, results
            answer, results = [], []
        answer.append(message)
    yield answer, results


def _each_call(message: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", ())
    if not calls:
        return [message]
    split: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        first = message if number == 0 else {"role": message["role"], "content": None}
        own = [result for result in results if result.get("tool_call_id") == call["id"]]
        split += [{**first, "tool_calls": [call]}, *own]
    return split


def _whole(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with its optional fields: a description and parameters, whose properties are objects."""
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
