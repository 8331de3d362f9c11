"""The items of /v1/responses: what a conversation is made of, and the messages of a chat that they stand for."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, PrivateAttr, StringConstraints, Tag, model_validator

from forebay.server.api.core.renaming import by_type, only
from forebay.server.api.openai.responses_tools import OfferedTool, Tool, name_in_chat, offered_tools
from forebay.server.api.openai.seals import MAX_SEALED_CHARS
from forebay.server.protocol.ignored import Harmless, one_of
from forebay.server.protocol.images import Detail, Image, SourceText
from forebay.server.protocol.messages import MAX_PARTS, text_or_list
from forebay.server.protocol.strict import History, Label, Strict, Text
from forebay.server.protocol.tools import MAX_TOOLS, CalledFunction
from forebay.server.protocol.validation import INVALID_COMBINATION, INVALID_VALUE, branch, by_shape, refusal

SUMMARY_PROMPT: Final = """\
Stop here and write a summary of this conversation. It replaces the conversation: you, or another model, will go on
from it alone. Call no tool and do not answer anything else. Write, as far as there is any of it:

- what the user wants, with all rules and preferences that were given
- what was done and found out so far, with the names of files, functions and commands, and exact values
- what was decided, and why
- which errors came up, and how they were dealt with
- what remains to be done, and the next step"""
FOUND: Final = "Tools found:"
FOUND_NONE: Final = "No tools found."
SUMMARY_BEFORE: Final = "The conversation so far was summed up, and this summary stands for it. Go on from it:"
SEALED: Final = "forebay:"  # begins what stands for thinking that a client hands back without looking at it
_LABEL: Final = Harmless(lambda value: value is None or isinstance(value, str), {"type": ["string", "null"]})
_STATUS: Final = one_of(None, "in_progress", "completed", "incomplete")
_OWN: Final = {"id": _LABEL, "status": _STATUS}
_CALLER: Final = {"caller": one_of(None, {"type": "direct"}), "async": one_of(None, False)}


class InputText(History):
    """A text from the user's side."""

    type: Literal["input_text"]
    text: Text


class OutputText(History):
    """A text that the model wrote earlier."""

    ignored = {"annotations": one_of(None, []), "logprobs": one_of(None, [])}
    type: Literal["output_text"]
    text: Text


class ThoughtText(History):
    """A text of the model's thinking, whole or summed up."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class InputImage(Image):
    """An image from the user's side."""

    ignored = {"file_id": one_of(None)}
    type: Literal["input_image"]
    image_url: SourceText
    detail: Detail | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the image as a part of a chat's message."""
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}


_TEXTS: Final = ("input_text", "output_text")
Part = Annotated[
    Annotated[InputText, Tag(branch("input_text"))]
    | Annotated[OutputText, Tag(branch("output_text"))]
    | Annotated[InputImage, Tag(branch("input_image"))],
    by_type(*_TEXTS, "input_image"),
    only(*_TEXTS, served="texts are served", image="input_image"),
]
_Texts = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of texts"),
]


def _joined(texts: str | list[Any]) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


def _content(parts: str | list[Any]) -> str | list[dict[str, Any]]:
    """Texts as one, unless there are images between them."""
    if isinstance(parts, str) or not any(isinstance(part, InputImage) for part in parts):
        return _joined(parts)
    return [part.as_chat() if isinstance(part, InputImage) else {"type": "text", "text": part.text} for part in parts]


class MessageItem(History):
    """A message of the conversation."""

    ignored = {**_OWN, "phase": one_of(None, "commentary", "final_answer")}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        at = next((i for i, part in enumerate(self.content) if isinstance(part, InputImage)), None)
        if at is not None and self.role != "user":
            what = f"content.{at}.type is input_image, which is for messages of role user, and role is {self.role}"
            raise refusal(INVALID_COMBINATION, f"content.{at}.type", what)
        return self


class FunctionCallItem(CalledFunction):
    """A function call that the model made earlier."""

    ignored = {**_OWN, **_CALLER}
    type: Literal["function_call"]
    call_id: Label
    namespace: Label | None = None

    def as_call(self) -> dict[str, Any]:
        """Return the call of a chat."""
        function = {"name": name_in_chat(self.namespace, self.name), "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionOutputItem(History):
    """The result of a function call."""

    ignored = {**_OWN, **_CALLER, "name": _LABEL, "namespace": _LABEL}
    type: Literal["function_call_output"]
    call_id: Label
    output: _Texts

    def as_message(self) -> dict[str, Any]:
        """Return the message of a chat."""
        return {"role": "tool", "content": _content(self.output), "tool_call_id": self.call_id}


class TextCallItem(History):
    """The call of a tool that takes one text."""

    ignored = {**_OWN, **_CALLER}
    type: Literal["custom_tool_call"]
    call_id: Label
    namespace: Label | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    input: Text

    def as_call(self) -> dict[str, Any]:
        """Return the call of a chat."""
        custom = {"name": name_in_chat(self.namespace, self.name), "input": self.input}
        return {"id": self.call_id, "type": "custom", "custom": custom}


class TextOutputItem(FunctionOutputItem):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ToolSearchCallItem(History):
    """A search for tools that the model asked for, and the client did."""

    ignored = {**_OWN, "created_by": _LABEL}
    type: Literal["tool_search_call"]
    execution: Literal["client"] = "client"
    call_id: Label
    arguments: Annotated[dict[str, Any], Field(fail_fast=True)] | Text = Field(default_factory=dict)

    def as_call(self) -> dict[str, Any]:
        """Return the call of a chat."""
        written = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.call_id, "type": "function", "function": {"name": "tool_search", "arguments": written}}


_Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolSearchOutputItem(History):
    """The tools that a search found. The model may call them from here on."""

    ignored = {**_OWN, "created_by": _LABEL}
    type: Literal["tool_search_output"]
    execution: Literal["client"] = "client"
    call_id: Label
    tools: _Tools

    def as_message(self) -> dict[str, Any]:
        """Return the message of a chat: the names of the tools, which the prompt describes."""
        names = ", ".join(offered.name for offered in offered_tools(self.tools))
        return {"role": "tool", "content": f"{FOUND} {names}" if names else FOUND_NONE, "tool_call_id": self.call_id}


class AdditionalToolsItem(History):
    """Tools that are offered beside those of the request."""

    ignored = {"id": _LABEL}
    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: _Tools


class ReasoningItem(History):
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


class CompactionItem(History):
    """A summary that stands for the conversation before it. It is sealed: `with_summary` adds its text."""

    ignored = {"id": _LABEL, "created_by": _LABEL}
    type: Literal["compaction", "compaction_summary"]
    encrypted_content: Annotated[str, StringConstraints(max_length=MAX_SEALED_CHARS)]
    _summary: str = PrivateAttr("")

    def as_message(self) -> dict[str, Any]:
        """Return the message of a chat; without a text if the item has not been opened."""
        return {"role": "user", "content": f"{SUMMARY_BEFORE}\n\n{self._summary}"}

    def with_summary(self, summary: str) -> CompactionItem:
        """Return the item with its text."""
        opened = self.model_copy()
        opened._summary = summary
        return opened


class CompactionTrigger(History):
    """The last item of a request for a summary."""

    type: Literal["compaction_trigger"]

    def as_message(self) -> dict[str, Any]:
        """Return the message of a chat."""
        return {"role": "user", "content": SUMMARY_PROMPT}


def sealed(text: str) -> str:
    """Return thinking for clients that send it back only if they cannot read it."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unsealed(text: str) -> str:
    """Raises ValueError for what `sealed` has not made."""
    if not text.startswith(SEALED):
        raise ValueError("another's")
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode()
    except binascii.Error as error:
        raise ValueError(str(error)) from error


_SERVED: Final = (
    "messages, reasoning, compactions, tools, and calls of functions, custom tools and searches with their outputs"
)
_ITEMS: Final = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "reasoning",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
)
Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag(branch("message"))]
    | Annotated[FunctionCallItem, Tag(branch("function_call"))]
    | Annotated[FunctionOutputItem, Tag(branch("function_call_output"))]
    | Annotated[TextCallItem, Tag(branch("custom_tool_call"))]
    | Annotated[TextOutputItem, Tag(branch("custom_tool_call_output"))]
    | Annotated[ToolSearchCallItem, Tag(branch("tool_search_call"))]
    | Annotated[ToolSearchOutputItem, Tag(branch("tool_search_output"))]
    | Annotated[AdditionalToolsItem, Tag(branch("additional_tools"))]
    | Annotated[ReasoningItem, Tag(branch("reasoning"))]
    | Annotated[CompactionItem, Tag(branch("compaction"))]
    | Annotated[CompactionItem, Tag(branch("compaction_summary"))]
    | Annotated[CompactionTrigger, Tag(branch("compaction_trigger"))],
    by_type(*_ITEMS, default="message"),
    only(*_ITEMS, served=f"{_SERVED} are served"),
]


CALLS: Final = (FunctionCallItem, TextCallItem, ToolSearchCallItem)
OUTPUTS: Final = (FunctionOutputItem, TextOutputItem, ToolSearchOutputItem)


def tools_alone(item: Item) -> AdditionalToolsItem | None:
    """Return the tools that an item brings, as an item that belongs to no call; None if it brings none."""
    if isinstance(item, ToolSearchOutputItem):
        return AdditionalToolsItem(type="additional_tools", tools=item.tools)
    return item if isinstance(item, AdditionalToolsItem) else None


def tools_of(items: Sequence[Item]) -> Iterator[tuple[int, list[Tool]]]:
    """Yield the tools that items bring, with the place of each item."""
    for place, item in enumerate(items):
        if isinstance(item, ToolSearchOutputItem | AdditionalToolsItem):
            yield place, item.tools


def tools_offered(tools: Sequence[Tool], items: Sequence[Item]) -> list[OfferedTool]:
    """Return the tools of a request that the client runs, and behind them those of its items. Of two with one name the
    first stands, except among the tools of the request, whose names must differ."""
    offered = list(offered_tools(tools))
    names = {each.name for each in offered}
    for place, found in tools_of(items):
        for each in offered_tools(found):
            if each.name not in names:
                names.add(each.name)
                offered.append(each._replace(place=f"input.{place}.{each.place}"))
    return offered


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Convert items to messages. Consecutive items of the model are one message: thinking, text, calls. System texts at
    the beginning are one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    last = messages[-1] if messages else {"role": ""}
    match item:
        case FunctionOutputItem() | ToolSearchOutputItem() | CompactionItem() | CompactionTrigger():
            messages.append(item.as_message())
        case MessageItem(role="assistant"):
            _own(messages, "content", "tool_calls")["content"] = _joined(item.content)
        case MessageItem(role="system" | "developer") if len(messages) == 1 and last["role"] == "system":
            last["content"] += "\n\n" + _joined(item.content)
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        case ReasoningItem():
            if item.text:
                own = _own(messages, "content", "tool_calls")
                own["reasoning_content"] = own.get("reasoning_content", "") + item.text
        case FunctionCallItem() | ToolSearchCallItem() | TextCallItem():
            _own(messages).setdefault("tool_calls", []).append(item.as_call())


def _own(messages: list[dict[str, Any]], *behind: str) -> dict[str, Any]:
    """Return the model's message to add to: a new one if the last is another's, or has one of the fields `behind`."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(last.get(name) for name in behind):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


class _Items(Strict):
    items: Annotated[list[Item], Field(fail_fast=True)]


def written(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as JSON has them."""
    return [item.model_dump(mode="json", exclude_none=True) for item in items]


def read(items: list[dict[str, Any]]) -> list[Item]:
    """The items that `written` has made, or an answer's output."""
    return _Items.parse({"items": items}, images=True).items
