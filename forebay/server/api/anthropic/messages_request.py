"""The request of /v1/messages, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, model_validator

from forebay.base.errors import InvalidRequest
from forebay.base.foreign import PASSED
from forebay.requests.sampling_params import MAX_STOP
from forebay.server.api.anthropic.messages_blocks import BlockText, ToolResult, Turn
from forebay.server.api.core.renaming import renamed
from forebay.server.protocol.cache_control import CacheControl
from forebay.server.protocol.ignored import neutral, one_of
from forebay.server.protocol.messages import (
    MAX_MESSAGES,
    Templated,
    TextPart,
    WithVariables,
    check_breakpoints,
    variables_as_chat,
)
from forebay.server.protocol.requests import I32, Bootstrap, ChatRequest, Choosing, StopString
from forebay.server.protocol.strict import Label, Strict, Text
from forebay.server.protocol.structured import two_forms
from forebay.server.protocol.tools import MAX_TOOLS, ToolName
from forebay.server.protocol.validation import (
    INVALID_COMBINATION,
    MISSING_FIELD,
    UNSUPPORTED_FIELD,
    refusal,
)

BILLING_HEADER: Final = "x-anthropic-billing-header:"  # Claude Code begins its system text with it
_NAMES: Final = {
    r"messages\..*": "messages",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\..*": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
    "max_thinking_tokens": "thinking.budget_tokens",
    "stop": "stop_sequences",
}


def _blocks(content: str | list[Any] | None) -> list[Any]:
    return content if isinstance(content, list) else []


class CustomTool(Strict):
    """A tool that the client offers."""

    ignored = {
        "eager_input_streaming": one_of(None, True, False),  # arguments are streamed as they are written
        "allowed_callers": one_of(None, ["direct"]),
        "input_examples": one_of(None, []),
    }
    type: Literal["custom"] | None = None
    name: ToolName
    defer_loading: bool | None = None  # all tools are in the prompt: none has to be searched for
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], Field(fail_fast=True)]
    strict: bool | None = None
    cache_control: CacheControl | None = None  # tools stand before all messages, and from their end others always go on

    @model_validator(mode="before")
    @classmethod
    def _refuse_hosted(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            what = f"type is {kind[:64]!a}: this server runs no tools, only custom ones are served"
            raise refusal(UNSUPPORTED_FIELD, "type", what)
        return data

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as a function of a chat."""
        own = {"description": self.description, "strict": self.strict}
        function = {"name": self.name, "parameters": self.input_schema, **own}
        mark = {} if self.cache_control is None else {"cache_control": self.cache_control}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}, **mark}


class WhichTool(Strict):
    """The choice whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise refusal(MISSING_FIELD, "name", "name is missing: it says which tool is to be called")
        if self.type != "tool" and self.name is not None:
            raise refusal(INVALID_COMBINATION, "name", "name is only allowed with type tool")
        return self

    def as_chat(self) -> dict[str, Any]:
        """Return the chat fields `tool_choice` and, if only one call may be made, `parallel_tool_calls`."""
        named = {"type": "function", "function": {"name": self.name}}
        choice = named if self.type == "tool" else "required" if self.type == "any" else self.type
        return {"tool_choice": choice, **({"parallel_tool_calls": False} if self.disable_parallel_tool_use else {})}


class ThinkingConfig(Strict):
    """Adaptive leaves open how long it is. Thinking that is displayed comes whole, not summed up."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            what = "budget_tokens goes with type enabled, and with no other"
            raise refusal(INVALID_COMBINATION, "budget_tokens", what)
        return self


class OutputConfig(Strict):
    """The effort of thinking, and the format that the answer must have."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the chat fields `reasoning_effort` and `response_format`, those that were given."""
        effort = {"reasoning_effort": "xhigh" if self.effort == "max" else self.effort} if self.effort else {}
        if self.format is None:
            return effort
        schema = {"name": "output", "strict": True, **{k: v for k, v in self.format.items() if k != "type"}}
        return {**effort, "response_format": {"type": self.format.get("type"), "json_schema": schema}}


class Metadata(Strict):
    """The user on whose behalf the request is made."""

    user_id: Label | None = None


class CountTokensRequest(WithVariables):
    """The fields of a request that become a prompt."""

    ignored = neutral("count_tokens")
    model: Annotated[str, StringConstraints(max_length=512)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: BlockText | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: WhichTool | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    _chat: ChatRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        if data.get("thread") is not None:
            raise InvalidRequest(
                "thread is not supported: send the whole conversation in messages, without thread",
                code="thread_unsupported_request",  # on which the client sends the request again without it
                param="thread",
            )
        body = super().parse(data, lenient=lenient, images=images)
        with renamed(_NAMES):
            body._chat = ChatRequest.parse(body.as_chat(), images=images)
        stated = body._variables_think
        if body.thinking is not None and stated not in (None, body.thinks):
            what = f"thinking has type {body.thinking.type}, and chat_template_kwargs say otherwise: send one of them"
            raise InvalidRequest(what, code=INVALID_COMBINATION, param="thinking")
        return body

    @property
    def chat(self) -> ChatRequest:
        return self._chat

    @property
    def renamings(self) -> dict[str, str]:
        """Which of this body's fields a chat's stand for."""
        return _NAMES

    @property
    def thinks(self) -> bool:
        """Whether thinking is wanted. A request that does not say so wants none, unless its own variables for the
        template do."""
        if self.thinking is None:
            return self._variables_think or False
        return self.thinking.type != "disabled"

    @property
    def _variables_think(self) -> bool | None:
        own = self.chat_template_kwargs
        return None if own is None else Templated(chat_template_kwargs=own).requested_thinking.thinks

    @property
    def marked(self) -> bool:
        """Return whether the client marks any part of the prompt for caching."""
        return bool(self._chat.marks)

    @model_validator(mode="after")
    def _check_marks(self) -> Self:
        check_breakpoints(sum(mark is not None for mark in self._marks()))
        return self

    def _marks(self) -> Iterator[CacheControl | None]:
        yield self.cache_control
        blocks: list[Any] = [*(self.tools or ()), *_blocks(self.system)]
        blocks += [block for message in self.messages for block in _blocks(message.content)]
        for block in blocks:
            yield getattr(block, "cache_control", None)  # a thinking block can have none
            if isinstance(block, ToolResult):
                yield from (part.cache_control for part in _blocks(block.content))

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        if self.messages[-1].role == "assistant":
            at = f"messages.{len(self.messages) - 1}.role"
            what = f"{at} is assistant: no answer can be begun for the model, the last message has to be the user's"
            raise refusal(UNSUPPORTED_FIELD, at, what)
        return self

    def as_chat(self) -> dict[str, Any]:
        """Return the request as the fields of a chat completion."""
        messages = [found for message in self.messages for found in message.as_chat()]
        if self.cache_control is not None:
            messages[-1]["cache_control"] = self.cache_control
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return {
            "model": self.model,
            "messages": messages,
            **({"tools": [tool.as_chat() for tool in self.tools]} if self.tools else {}),
            **(self.tool_choice.as_chat() if self.tool_choice else {}),
            **(self.output_config.as_chat() if self.output_config else {}),
            **variables_as_chat(self),
        }


class MessagesRequest(Choosing, Bootstrap, CountTokensRequest):
    """The body of /v1/messages."""

    ignored = {**CountTokensRequest.ignored, **neutral("messages")}
    passed = PASSED
    max_tokens: Annotated[int, Field(ge=1, le=I32)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _says_once_what_it_looks_like(self) -> Self:
        if self.grammars and self.output_config is not None and self.output_config.format is not None:
            raise two_forms("output_config.format", self.grammars[0].field)
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            at = "thinking.budget_tokens"
            what = f"{at} is {budget} and max_tokens {self.max_tokens}: the budget has to be the smaller one"
            raise refusal(INVALID_COMBINATION, at, what)
        return self

    def as_chat(self) -> dict[str, Any]:
        """Return the request as the fields of a chat completion, with its limits and sampling."""
        names = ("max_tokens", "stream")
        own = {name: getattr(self, name) for name in (*names, *Bootstrap.model_fields)}
        stops = [*(self.stop_sequences or ()), *(self.stop or ())]
        own |= {"stop": stops or None, "user": self.metadata.user_id if self.metadata else None}
        own["max_thinking_tokens"] = self.thinking.budget_tokens if self.thinking is not None else None
        kept = {name: value for name, value in own.items() if value is not None}
        return {**super().as_chat(), **self.chosen, **kept}


def behind_the_system_text(chat: ChatRequest) -> ChatRequest:
    """Return the chat with the client's billing line at the end of the system text. The client changes that line with
    every request: at the beginning, no prompt would share a prefix with another. A chat without such a line is returned
    unchanged."""
    first = chat.messages[0]
    if first.role != "system" or not first.content:
        return chat
    content = [TextPart(type="text", text=first.content)] if isinstance(first.content, str) else first.content
    parts = [part for part in content if isinstance(part, TextPart)]  # a system text has no images
    if not parts[0].text.startswith(BILLING_HEADER):
        return chat
    line, _, text = parts[0].text.partition("\n")
    kept = [parts[0].model_copy(update={"text": text}), *parts[1:]] if text else parts[1:]
    moved = first.model_copy(update={"content": [*kept, *_texts("\n" if kept else "", line)]})
    return chat.model_copy(update={"messages": [moved, *chat.messages[1:]]})


def _texts(*texts: str) -> Iterable[TextPart]:
    return (TextPart(type="text", text=text) for text in texts)
