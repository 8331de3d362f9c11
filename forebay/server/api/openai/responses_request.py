"""The request of /v1/responses, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, StringConstraints, Tag, model_validator

from forebay.base.foreign import PASSED, passed_fields
from forebay.requests.sampling_params import MAX_TOP_LOGPROBS
from forebay.server.api.core.renaming import renamed
from forebay.server.api.openai.responses_items import (
    CompactionTrigger,
    Item,
    MessageItem,
    messages_of,
    tools_of,
    tools_offered,
)
from forebay.server.api.openai.responses_tools import (
    OfferedTool,
    Tool,
    ToolChoice,
    hosted_tools,
    shown_tools,
)
from forebay.server.protocol.ignored import MAX_METADATA, MAX_METADATA_KEY, neutral, one_of
from forebay.server.protocol.messages import MAX_MESSAGES, WithVariables, text_or_list, variables_as_chat
from forebay.server.protocol.requests import I32, Bootstrap, ChatRequest, Choosing
from forebay.server.protocol.strict import Label, Strict, Text
from forebay.server.protocol.structured import two_forms
from forebay.server.protocol.tools import MAX_TOOLS
from forebay.server.protocol.validation import INVALID_COMBINATION, UNSUPPORTED_FIELD, branch, by_shape, refusal

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
_NAMES: Final = {
    r"messages(\..*)?": "input",
    r"tool_choice\..*": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}


class ReasoningConfig(Strict):
    """The requested effort of thinking."""

    ignored = {"summary": one_of(None, "auto"), "generate_summary": one_of(None, "auto")}  # there is all of it
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TextConfig(Strict):
    """The requested format and verbosity of the answer's text."""

    format: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the chat fields `verbosity` and `response_format`, those that were given."""
        said = {"verbosity": self.verbosity} if self.verbosity else {}
        if self.format is None:
            return said
        kind = self.format.get("type")
        schema = {key: value for key, value in self.format.items() if key != "type"}
        return {**said, "response_format": {"type": kind, **({"json_schema": schema} if schema else {})}}


TRIGGER: Final = CompactionTrigger(type="compaction_trigger")


def _check_trigger(items: list[Item]) -> list[Item]:
    for place, item in enumerate(items[:-1]):
        if isinstance(item, CompactionTrigger):
            what = f"{place}.type is compaction_trigger: only the last item may be one"
            raise refusal(INVALID_COMBINATION, f"{place}.type", what)
    return items


class ContextManagement(Strict):
    """The conversation is compacted before the answer if its prompt has more than `compact_threshold` tokens."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=1, le=I32)] | None = None


class InputTokensRequest(WithVariables):
    """The fields of a request that become a prompt."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    input: Annotated[
        Annotated[Text, Tag(branch("text"))]
        | Annotated[
            list[Item],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            AfterValidator(_check_trigger),
            Tag(branch("list")),
        ],
        by_shape(text_or_list, "a string or a list of items"),
    ]
    instructions: Text | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: Label | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    _chat: ChatRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False, images: bool = False) -> Self:
        body = super().parse(data, lenient=lenient, images=images)
        body._chat = body.chat_of(body.items)
        return body

    @model_validator(mode="after")
    def _has_no_conversation(self) -> Self:
        if self.conversation not in (None, False):
            what = "conversation is not supported: name a stored response (previous_response_id), or send all as input"
            raise refusal(UNSUPPORTED_FIELD, "conversation", what)
        return self

    @property
    def chat(self) -> ChatRequest:
        return self._chat

    @property
    def items(self) -> Sequence[Item]:
        """The input as items: a plain text is one message of the user."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def renamings(self) -> dict[str, str]:
        """Which of this body's fields a chat's stand for."""
        own: dict[str, str] = {}
        for i, tool in enumerate(self.own_tools(self.items)):
            own[rf"tools\.{i}\.custom\.format\.grammar"] = f"{tool.place}.format"
            own[rf"tools\.{i}\.(function|custom)"] = tool.place
        return own | _NAMES

    def own_tools(self, items: Sequence[Item]) -> list[OfferedTool]:
        """Return the tools that the client runs, of a conversation with these items."""
        return tools_offered(self.tools or (), items)

    @property
    def left_out(self) -> list[str]:
        """The hosted tools, each kind once: this server does not run them."""
        every = (self.tools or (), *(tools for _, tools in tools_of(self.items)))
        kinds = (str(tool["type"])[:64] for tools in every for tool in hosted_tools(tools))
        return list(dict.fromkeys(kinds))

    def chat_of(self, items: Sequence[Item]) -> ChatRequest:
        """Return the chat of these items. Raises InvalidRequest that names this body's fields."""
        with renamed(self.renamings):
            return ChatRequest.parse(self._as_chat(items), images=True)  # those of the items were checked

    def _as_chat(self, items: Sequence[Item]) -> dict[str, Any]:
        choice = self.tool_choice
        own = {
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": [tool.as_chat() for tool in self.own_tools(items)] or None,
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.as_chat(),
        }
        kept = {name: value for name, value in own.items() if value is not None}
        messages = messages_of(items, self.instructions)
        text = self.text.as_chat() if self.text else {}
        return {"messages": messages, **kept, **text, **variables_as_chat(self)}


class CompactRequest(Bootstrap, InputTokensRequest):
    """The body of /v1/responses/compact: as of a response, whose fields for sampling change no summary."""

    ignored = {**InputTokensRequest.ignored, **neutral("responses")}
    passed = PASSED | passed_fields("responses", "compact")
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @property
    def items(self) -> Sequence[Item]:
        """The input, and the trigger behind it."""
        return [*super().items, TRIGGER]

    def _as_chat(self, items: Sequence[Item]) -> dict[str, Any]:
        names = ("user", "safety_identifier", "prompt_cache_key", *Bootstrap.model_fields)
        kept = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**super()._as_chat(items), **kept}


class ResponsesRequest(Choosing, Bootstrap, InputTokensRequest):
    """`store` and `previous_response_id` need a server that stores responses."""

    ignored = {**InputTokensRequest.ignored, **neutral("responses")}
    passed = PASSED | passed_fields("responses")
    max_output_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    include: (
        Annotated[
            list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=MAX_METADATA_KEY)], Label],
            Field(max_length=MAX_METADATA, fail_fast=True),
        ]
        | None
    ) = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    store: bool | None = None
    background: bool | None = None
    context_management: Annotated[list[ContextManagement], Field(max_length=1, fail_fast=True)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=I32)] | None = None

    @model_validator(mode="after")
    def _waits_or_is_stored(self) -> Self:
        if self.background and (self.stream or self.store is False):
            name = "stream" if self.stream else "store"
            what = "a response in the background is stored, and asked for with GET /v1/responses/ID"
            raise refusal(INVALID_COMBINATION, name, f"{what}: leave {name} out")
        return self

    @model_validator(mode="after")
    def _says_once_what_it_looks_like(self) -> Self:
        if self.grammars and self.text is not None and self.text.format is not None:
            raise two_forms("text.format", self.grammars[0].field)
        return self

    @property
    def wants_sealed(self) -> bool:
        return ENCRYPTED in (self.include or ())

    @property
    def num_top(self) -> int:
        """Number of alternatives with log-probabilities beside the chosen token; -1 for none at all."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else -1)

    def _as_chat(self, items: Sequence[Item]) -> dict[str, Any]:
        names = ("stream", "user", "safety_identifier", "prompt_cache_key")
        own = {name: getattr(self, name) for name in (*names, *Bootstrap.model_fields)}
        own["max_completion_tokens"] = self.max_output_tokens
        kept = {name: value for name, value in own.items() if value is not None}
        return {**super()._as_chat(items), **self.chosen, **kept}

    def echo(self, *, stored: bool) -> dict[str, Any]:
        """Return the fields that the answer repeats, without those that may be long."""
        ignored = {"ignored": ", ".join(self.left_out)[:512]} if self.left_out else {}
        choice = self.tool_choice
        return {
            "background": bool(self.background),
            "instructions": None,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": {**(self.metadata or {}), **ignored},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": stored,
            "temperature": self.chosen.get("temperature"),
            "text": {"format": {"type": ((self.text and self.text.format) or {}).get("type", "text")}},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "tools": shown_tools(self.tools or ()),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.chosen.get("top_p"),
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
