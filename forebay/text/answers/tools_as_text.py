"""Tools described in text, in the format of Hermes, for chat templates that do not render them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from forebay.text.answers.formats import CALL_FORMATS

Message = dict[str, Any]
HERMES: Final = "hermes"  # the format in which tools are described where a template writes nothing of them
_IN_PYTHON: Final = ("lfm2", "pythonic")
GLM4: Final = "glm4"  # whose template shows calls by fields of its own
_PHI4_MINI: Final = "phi4_mini"  # whose template shows no calls

_INSTRUCTIONS: Final = """You may call these tools, one JSON schema a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments {how}, and nothing behind the last call:
{example}"""
_HOW: Final = "as JSON between these tags"
_EXAMPLE: Final = """<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>"""
_HOW_HERE: Final = "as in this call of a tool that does not exist"


_BEFORE, _AFTER = "<tool_response>\n", "\n</tool_response>"


def tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the conversation with calls and results as text, and a system message that describes `tools`."""
    return tools_described([_result_in_text(calls_in_text(message)) for message in messages], tools)


def tools_described(messages: Sequence[Message], tools: Sequence[dict[str, Any]], example: str = "") -> list[Message]:
    """Return the conversation with a system message that describes `tools`. `example` is a call as the model's chat
    template writes it; without one, calls are in the format of Hermes."""
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    how = _HOW_HERE if example else _HOW
    instructions = _INSTRUCTIONS.format(tools=listed, how=how, example=example or _EXAMPLE)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _result_in_text(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    content = message["content"]
    kept = {key: value for key, value in message.items() if key not in ("tool_call_id", "name")}
    if isinstance(content, list):  # there are images in it
        before, after = ({"type": "text", "text": text} for text in (_BEFORE, _AFTER))
        return {**kept, "role": "user", "content": [before, *content, after]}
    return {**kept, "role": "user", "content": f"{_BEFORE}{content}{_AFTER}"}


def calls_in_text(message: Message, form: str = HERMES) -> Message:
    """Move a message's tool calls into its content, in the format `form` if that can be written, else in Hermes'."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    called = [call["function"] for call in calls]
    written = _as_python(called, form) if form in _IN_PYTHON else _as_objects(called, form)
    return {**kept, "content": "\n".join(filter(None, (message["content"], written)))}


def called_by_metadata(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation in the fields of GLM 4's template: the name of a call is `metadata`, its arguments are
    the content, and a result is an observation."""
    shown: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            shown.append({"role": "observation", "content": message["content"]})
            continue
        calls = message.get("tool_calls", ())
        if not calls or message["content"]:
            shown.append({key: value for key, value in message.items() if key != "tool_calls"})
        functions = (call["function"] for call in calls)
        shown += [
            {"role": message["role"], "metadata": function["name"], "content": _text(function["arguments"])}
            for function in functions
        ]
    return shown


def _text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_objects(calls: Sequence[dict[str, Any]], form: str) -> str:
    if form == _PHI4_MINI:
        listed = ", ".join(json.dumps(call, ensure_ascii=False) for call in calls)
        return f"{CALL_FORMATS[form].begins[0]}{listed}]"
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def _as_python(calls: Sequence[dict[str, Any]], form: str) -> str:
    marks = CALL_FORMATS[form]
    written = (f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})" for call in calls)
    return f"{marks.begins[0]}[{', '.join(written)}]{marks.after[0]}"
