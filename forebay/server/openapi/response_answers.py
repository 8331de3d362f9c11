"""The shapes of the answers of /v1/responses, for /openapi.json, as in `server.openapi.answers`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from forebay.server.api.generation import CacheUsage
from forebay.server.openapi.answers import CachedDetails, ReasoningDetails


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int
    weight_version: int
    cache: CacheUsage


class ResponseItem(TypedDict):
    """A message has a `role`, thinking a `summary` and perhaps `encrypted_content`, and both `content`; a call has
    `call_id`, `name`, and `arguments` or for a tool that takes one text `input`."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    encrypted_content: NotRequired[str | None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ModelResponse(TypedDict):
    """The fields of the request that are not long come back in it. `metadata.ignored`: tools that are left out."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[ResponseItem]
    usage: ResponseUsage
    metadata: dict[str, str]
    store: bool
    previous_response_id: str | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
