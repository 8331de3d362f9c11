"""What a chat asks of tools and thinking, against what the model's chat template can say of them."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.server.generation import Reading
from forebay.server.protocol import ChatRequest
from forebay.server.validation import UNSUPPORTED_FIELD
from forebay.text.answers.probes import Findings
from forebay.text.answers.reading import reader_for
from forebay.text.answers.telling import told_in_text
from forebay.text.token_bytes import TokenBytes
from forebay.text.tokenizer import Tokenizer

TAIL_TOKENS: Final = 16  # more than the tag that opens the thinking has


def check_answerable(body: ChatRequest, found: Findings) -> None:
    """Raises InvalidRequest for tools of a model whose calls nobody can read, and for an effort that its template does
    not know."""
    if body.offered_tools and found.formats.calls is None:
        why = found.evidence.get("tool_calls", "there is no chat template")
        raise InvalidRequest(f"this model takes no tools: {why}", code=UNSUPPORTED_FIELD, param="tools")
    if body.reasoning_effort not in (None, "none") and not found.variables:
        what = "reasoning_effort is not known to this model's chat template: leave it out"
        raise InvalidRequest(what, code=UNSUPPORTED_FIELD, param="reasoning_effort")


def for_template(messages: list[dict[str, Any]], variables: dict[str, Any], found: Findings) -> list[dict[str, Any]]:
    """The messages as the chat template wants them, `variables` less what it does not read."""
    if found.ignores_tools:
        return told_in_text(messages, variables.pop("tools", []))
    return [_as_text(message) if "tool_calls" in message and found.takes_text else message for message in messages]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of calls as JSON in text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def reading_of(body: ChatRequest, found: Findings, tokenizer: Tokenizer, prompt: list[int]) -> Reading | None:
    """How the answers are read; None where they can only be text."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.offered_tools}
    if not tools and found.formats.thinking is None:
        return None
    opened = found.opens_thinking(tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False))
    make = partial(reader_for, found.formats, tools, opened=opened)
    table = _shown(tokenizer.table, found.formats.spellings)
    return Reading(make, table, one_call=body.parallel_tool_calls is False)


@lru_cache(maxsize=8)
def _shown(table: TokenBytes, spellings: frozenset[str]) -> TokenBytes:
    return table.showing(spellings)
