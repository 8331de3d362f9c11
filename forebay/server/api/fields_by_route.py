"""The fate of each field of sampling and output on each route, read off the bodies' declarations."""

from __future__ import annotations

from enum import Enum
from typing import Final

from forebay.base.foreign import ABSENT_FIELDS, PASSED, why_field_is_absent
from forebay.server.api.anthropic.messages_request import MessagesRequest
from forebay.server.api.llama.request import LlamaCompletionRequest
from forebay.server.api.openai.responses_request import ResponsesRequest
from forebay.server.protocol.requests import TOOL_FIELDS, Bootstrap, ChatRequest, CompletionRequest
from forebay.server.protocol.strict import Strict

BODIES: Final[dict[str, type[Strict]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/completion": LlamaCompletionRequest,
}
_OTHERS: Final = {"messages", "prompt", "model", *TOOL_FIELDS, "functions", "function_call", "metadata", "system"}


class Fate(Enum):
    """The outcome of a field on a route."""

    TAKEN = "taken"
    NEUTRAL = "neutral"  # values that ask for nothing pass, and others are refused
    PASSED = "passed over"  # no value changes an answer; it is named in x-forebay-ignored
    REFUSED = "refused"


def fate(body: type[Strict], name: str) -> Fate:
    """Return the fate of the field `name` in a body of this type."""
    if name in body.names():
        return Fate.TAKEN
    if name in body.ignored:
        return Fate.NEUTRAL
    return Fate.PASSED if name in body.passed and not why_field_is_absent(name) else Fate.REFUSED


def fields() -> list[str]:
    """Return the fields of sampling and output that some route takes, and those that are passed over."""
    of_chats = [*ChatRequest.names(), *CompletionRequest.names(), *ChatRequest.ignored, *CompletionRequest.ignored]
    left_out = _OTHERS | Bootstrap.names().keys()
    named = dict.fromkeys([*of_chats, *sorted(PASSED), *sorted(ABSENT_FIELDS)])
    return [name for name in named if name not in left_out]


def rows() -> list[tuple[str, dict[str, Fate]]]:
    """Return the fields whose fate is not a refusal on every route."""
    found = [(name, {path: fate(body, name) for path, body in BODIES.items()}) for name in fields()]
    return [(name, fates) for name, fates in found if set(fates.values()) != {Fate.REFUSED}]
