"""Tools described in text, in the format of Hermes, for chat templates that do not render them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

Message = dict[str, Any]

_TOLD: Final = """You may call these tools, one JSON schema a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags, and nothing behind the last call:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


_BEFORE, _AFTER = "<tool_response>\n", "\n</tool_response>"


def tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the conversation with calls and results as text, and a system message that describes `tools`."""
    written = [_result_in_text(calls_in_text(message)) for message in messages]
    if not tools:
        return written
    told = _TOLD.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{told}"}, *written[1:]]
    return [{"role": "system", "content": told}, *written]


def _result_in_text(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    content = message["content"]
    if isinstance(content, list):  # there are images in it
        before, after = ({"type": "text", "text": text} for text in (_BEFORE, _AFTER))
        return {"role": "user", "content": [before, *content, after]}
    return {"role": "user", "content": f"{_BEFORE}{content}{_AFTER}"}


def calls_in_text(message: Message) -> Message:
    """Move a message's tool calls into its content, as `<tool_call>` blocks."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message["content"], *lines)))}
