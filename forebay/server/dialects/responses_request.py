"""What /v1/responses is asked, and the chat that this stands for. Nothing is kept: the input is all of it."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, Tag, WithJsonSchema, model_validator

from forebay.requests.sampling_params import BOUNDS
from forebay.server.dialects.renaming import by_type, only, renamed
from forebay.server.protocol.ignored import IGNORED, MAX_METADATA, MAX_METADATA_KEY, Harmless, one_of
from forebay.server.protocol.messages import MAX_MESSAGES, MAX_PARTS, text_or_list
from forebay.server.protocol.requests import I32, WITHIN, Bootstrap, ChatRequest
from forebay.server.protocol.strict import Label, Strict, Text
from forebay.server.protocol.tools import MAX_TOOLS, CalledFunction, ToolFunction, ToolName
from forebay.server.protocol.validation import (
    INVALID_VALUE,
    UNSUPPORTED_FIELD,
    branch,
    by_shape,
    refusal,
)

SEALED: Final = "forebay:"  # begins what stands for thinking that a client hands back without looking at it
ENCRYPTED: Final = "reasoning.encrypted_content"
_NAMES: Final = {
    r"messages(\..*)?": "input",
    r"tool_choice\..*": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
_LABEL: Final = Harmless(lambda value: value is None or isinstance(value, str), {"type": ["string", "null"]})
_STATUS: Final = one_of(None, "in_progress", "completed", "incomplete")
_OWN: Final = {"id": _LABEL, "status": _STATUS}
_CALLER: Final = {"caller": one_of(None, {"type": "direct"}), "namespace": one_of(None)}


class InputText(Strict):
    type: Literal["input_text"]
    text: Text


class OutputText(Strict):
    ignored = {"annotations": one_of(None, []), "logprobs": one_of(None, [])}
    type: Literal["output_text"]
    text: Text


class ThoughtText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


_TEXTS: Final = ("input_text", "output_text")
Part = Annotated[
    Annotated[InputText, Tag(branch("input_text"))] | Annotated[OutputText, Tag(branch("output_text"))],
    by_type(*_TEXTS),
    only(*_TEXTS, served="texts are served"),
]
_Texts = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of texts"),
]


def _joined(texts: str | list[Any]) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


class MessageItem(Strict):
    ignored = {**_OWN, "phase": one_of(None, "commentary", "final_answer")}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts


class FunctionCallItem(CalledFunction):
    ignored = {**_OWN, **_CALLER}
    type: Literal["function_call"]
    call_id: Label


class FunctionOutputItem(Strict):
    ignored = {**_OWN, **_CALLER, "name": _LABEL}
    type: Literal["function_call_output"]
    call_id: Label
    output: _Texts


class ReasoningItem(Strict):
    """Thinking as text or sealed; a summary says nothing that the model has not said elsewhere."""

    ignored = _OWN
    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ThoughtText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    encrypted_content: Text | None = None

    @property
    def text(self) -> str:
        return _joined(self.content) if self.content else unsealed(self.encrypted_content or SEALED)

    @model_validator(mode="after")
    def _check_seal(self) -> Self:
        try:
            self.text  # noqa: B018
        except ValueError as error:
            what = "encrypted_content was not made by this server: send content, or leave the item out"
            raise refusal(INVALID_VALUE, "encrypted_content", what) from error
        return self


def sealed(text: str) -> str:
    """For clients that hand thinking back only where they cannot read it."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unsealed(text: str) -> str:
    """Raises ValueError for what `sealed` has not made."""
    if not text.startswith(SEALED):
        raise ValueError("another's")
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode()
    except binascii.Error as error:
        raise ValueError(str(error)) from error


_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[MessageItem, Tag(branch("message"))]
    | Annotated[FunctionCallItem, Tag(branch("function_call"))]
    | Annotated[FunctionOutputItem, Tag(branch("function_call_output"))]
    | Annotated[ReasoningItem, Tag(branch("reasoning"))],
    by_type(*_ITEMS, default="message"),
    only(*_ITEMS, served="message, function_call, function_call_output and reasoning are served"),
]


class FunctionTool(ToolFunction):
    ignored = {
        "allowed_callers": one_of(None, ["direct"]),
        "defer_loading": one_of(None, False),
        "output_schema": one_of(None),
    }
    type: Literal["function"]

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


_OTHER_TOOL: Final = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"const": "function"}}},
    "required": ["type"],
}


def _tool_shape(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return branch("function" if kind == "function" else "other") if isinstance(kind, str) else None


Tool = Annotated[
    Annotated[FunctionTool, Tag(branch("function"))]
    | Annotated[dict[str, Any], Field(fail_fast=True), WithJsonSchema(_OTHER_TOOL), Tag(branch("other"))],
    by_shape(_tool_shape, "an object with a type"),
]


class FunctionChoice(Strict):
    type: Literal["function"]
    name: ToolName


def _choice_shape(value: Any) -> str | None:
    return branch("text") if isinstance(value, str) else branch("tool") if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(branch("text"))]
    | Annotated[FunctionChoice, Tag(branch("tool"))],
    by_shape(_choice_shape, "none, auto, required or the name of a function"),
]


class ReasoningWish(Strict):
    ignored = {"summary": one_of(None, "auto"), "generate_summary": one_of(None, "auto")}  # there is all of it
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TextWish(Strict):
    ignored = {"verbosity": IGNORED["verbosity"]}
    format: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None

    def as_chat(self) -> dict[str, Any]:
        if self.format is None:
            return {}
        kind = self.format.get("type")
        schema = {key: value for key, value in self.format.items() if key != "type"}
        return {"response_format": {"type": kind, **({"json_schema": schema} if schema else {})}}


class ResponsesRequest(Bootstrap):
    ignored = {
        "max_tool_calls": one_of(None),
        "prompt": one_of(None),
        "stream_options": one_of(None, {}, {"include_obfuscation": False}),
        "top_logprobs": one_of(None, 0),
        "truncation": one_of(None, "disabled"),
    }
    passed = frozenset({"client_metadata", "prompt_cache_options", "prompt_cache_retention", "service_tier"})
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    input: Annotated[
        Annotated[Text, Tag(branch("text"))]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag(branch("list"))],
        by_shape(text_or_list, "a string or a list of items"),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=I32)] | None = None
    temperature: Annotated[float, WITHIN["temperature"]] | None = None
    top_p: Annotated[float, Field(gt=BOUNDS["top_p"][0], le=BOUNDS["top_p"][1])] | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextWish | None = None
    reasoning: ReasoningWish | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16, fail_fast=True)] | None = None
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
    previous_response_id: Label | None = None
    conversation: Any = None
    _chat: ChatRequest = PrivateAttr()

    @classmethod
    def parse(cls, data: dict[str, Any], *, lenient: bool = False) -> Self:
        body = super().parse(data, lenient=lenient)
        with renamed(body.renamings):
            body._chat = ChatRequest.parse(body._as_chat())
        return body

    @model_validator(mode="after")
    def _keeps_nothing(self) -> Self:
        answers = "answers are not kept by this server"
        for name, why in (
            ("store", f"{answers}: set store=false"),
            ("background", f"{answers}, and one is made while its client waits: leave background out"),
            ("previous_response_id", f"{answers}: send the whole conversation as input"),
            ("conversation", f"{answers}: send the whole conversation as input"),
        ):
            if getattr(self, name) not in (None, False):
                raise refusal(UNSUPPORTED_FIELD, name, f"{name} is not supported, {why}")
        return self

    @property
    def chat(self) -> ChatRequest:
        return self._chat

    @property
    def renamings(self) -> dict[str, str]:
        """Which of this body's fields a chat's stand for."""
        places = (place for place, tool in enumerate(self.tools or ()) if isinstance(tool, FunctionTool))
        return {rf"tools\.{i}\.function": f"tools.{place}" for i, place in enumerate(places)} | _NAMES

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def left_out(self) -> list[str]:
        """The tools that somebody else would run, each kind once."""
        kinds = (str(tool["type"])[:64] for tool in self.tools or () if isinstance(tool, dict))
        return list(dict.fromkeys(kinds))

    @property
    def wants_sealed(self) -> bool:
        return ENCRYPTED in (self.include or ())

    def _as_chat(self) -> dict[str, Any]:
        names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "safety_identifier")
        own = {name: getattr(self, name) for name in (*names, "prompt_cache_key", *Bootstrap.model_fields)}
        own["max_completion_tokens"] = self.max_output_tokens
        own["reasoning_effort"] = self.reasoning.effort if self.reasoning else None
        own["tools"] = [tool.as_chat() for tool in self.functions] or None
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else None
        own["tool_choice"] = named or choice
        kept = {name: value for name, value in own.items() if value is not None}
        return {"messages": self._messages(), **kept, **(self.text.as_chat() if self.text else {})}

    def _messages(self) -> list[dict[str, Any]]:
        """What the model did in a row is one message: thinking, text, calls. System texts at the beginning are one."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _add(messages, item)
        return messages

    def echo(self) -> dict[str, Any]:
        """What the answer repeats of it: not what may be long."""
        ignored = {"ignored": ", ".join(self.left_out)[:512]} if self.left_out else {}
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": {**(self.metadata or {}), **ignored},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": ((self.text and self.text.format) or {}).get("type", "text")}},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [{"type": "function", "name": tool.name, "parameters": None} for tool in self.functions],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    last = messages[-1] if messages else {"role": ""}
    match item:
        case FunctionOutputItem():
            messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
        case MessageItem(role="assistant"):
            _own(messages, "content", "tool_calls")["content"] = _joined(item.content)
        case MessageItem(role="system" | "developer") if len(messages) == 1 and last["role"] == "system":
            last["content"] += "\n\n" + _joined(item.content)
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _joined(item.content)})
        case ReasoningItem():
            if item.text:
                own = _own(messages, "content", "tool_calls")
                own["reasoning_content"] = own.get("reasoning_content", "") + item.text
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _own(messages).setdefault("tool_calls", []).append(call)


def _own(messages: list[dict[str, Any]], *behind: str) -> dict[str, Any]:
    """The model's message to add to: a new one where the last is another's, or has something of `behind` already."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(last.get(name) for name in behind):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]
