"""The messages of a request of /v1/messages: turns, the blocks that they are made of, and the chat's messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from forebay.server.api.core.renaming import by_type, only
from forebay.server.protocol.cache_control import CacheControl
from forebay.server.protocol.ignored import one_of
from forebay.server.protocol.images import Image, Source, SourceText
from forebay.server.protocol.messages import (
    MAX_PARTS,
    TextPart,
    text_or_list,
)
from forebay.server.protocol.strict import History, Label, Text
from forebay.server.protocol.validation import (
    INVALID_COMBINATION,
    INVALID_VALUE,
    branch,
    by_shape,
    refusal,
)

_ERROR: Final = "Error: "  # chats have no other word for a tool that failed
OneType = TypeVar("OneType")
_DIRECT: Final = one_of(None, {"type": "direct"})


class TextBlock(TextPart):
    """A text within a message."""

    ignored = {"citations": one_of(None, [])}


BlockText = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag(branch("list"))],
    by_shape(text_or_list, "a string or a list of text blocks"),
]


class Base64Source(History):
    """The data of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: SourceText


class UrlSource(History):
    """The URL of an image."""

    type: Literal["url"]
    url: SourceText


class ImageBlock(Image):
    """An image within a message, or within a tool's result."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag(branch("base64"))] | Annotated[UrlSource, Tag(branch("url"))],
        by_type("base64", "url"),
        only("base64", "url", served="sources base64 and url are served"),
    ]
    cache_control: CacheControl | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the image as a part of a chat's message; the block is then empty."""
        source = self.source
        if isinstance(source, Base64Source):
            url = Source(f"data:{source.media_type};base64,{source.data.take()}")
        else:
            url = source.url
        return {"type": "image_url", "image_url": {"url": url}, **_mark(self.cache_control)}


class ToolReference(History):
    """A tool that a client's own search has found. All tools are in the prompt, so that its name is enough."""

    type: Literal["tool_reference"]
    tool_name: Label
    cache_control: CacheControl | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the name as a text of a chat's message."""
        return {"type": "text", "text": f"{self.tool_name}\n", **_mark(self.cache_control)}


def _result_kind(value: Any) -> str:
    """Return the branch of a part; that of a text for other types, which it refuses by name."""
    kind = value.get("type") if isinstance(value, dict) else value.type
    return branch(kind if kind in ("image", "tool_reference") else "text")


ResultContent = Annotated[
    Annotated[Text, Tag(branch("text"))]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag(branch("text"))]
                | Annotated[ImageBlock, Tag(branch("image"))]
                | Annotated[ToolReference, Tag(branch("tool_reference"))],
                Discriminator(_result_kind),
            ]
        ],
        Field(max_length=MAX_PARTS, fail_fast=True),
        Tag(branch("list")),
    ],
    by_shape(text_or_list, "a string or a list of text blocks"),
]


class ToolUse(History):
    """A call that the assistant made in an earlier turn."""

    ignored = {"caller": _DIRECT, "toolset_name": one_of(None)}
    type: Literal["tool_use"]
    id: Label
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    input: Annotated[dict[str, Any], Field(fail_fast=True)]
    cache_control: CacheControl | None = None

    @cached_property
    def arguments(self) -> str:
        return json.dumps(self.input, ensure_ascii=False, allow_nan=False)

    @model_validator(mode="after")
    def _is_json(self) -> Self:
        try:
            self.arguments.encode()
        except ValueError as error:
            raise refusal(INVALID_VALUE, "input", f"input is no JSON ({str(error)[:100]})") from error
        return self

    def as_chat(self) -> dict[str, Any]:
        """Return the call of a chat's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolResult(History):
    """The result of a call, which its client sends back."""

    ignored = {"toolset_name": one_of(None)}
    type: Literal["tool_result"]
    tool_use_id: Label
    content: ResultContent | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the result as a message of role `tool`; an error is marked by a line of text before its content."""
        content: Any = (_parts(self.content) if isinstance(self.content, list) else self.content) or ""
        if self.is_error:
            parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
            content = [TextPart(type="text", text=_ERROR), *parts]
        return {"role": "tool", "content": content, "tool_call_id": self.tool_use_id, **_mark(self.cache_control)}


class ThinkingBlock(History):
    """A block of thinking. `signature` proves its origin to the model's maker; it is not checked here."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


_PARTS: Final = ("thinking", "text", "tool_use")  # of an answer's message, in their order
_BLOCKS: Final = ("text", "tool_use", "tool_result", "thinking")
_ROLES: Final = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user", "image": "user"}
Block = Annotated[
    Annotated[TextBlock, Tag(branch("text"))]
    | Annotated[ToolUse, Tag(branch("tool_use"))]
    | Annotated[ToolResult, Tag(branch("tool_result"))]
    | Annotated[ThinkingBlock, Tag(branch("thinking"))]
    | Annotated[ImageBlock, Tag(branch("image"))],
    by_type(*_BLOCKS, "image"),
    only(*_BLOCKS, served="text, tool_use, tool_result and thinking blocks are served", image="image"),
]


class Turn(History):
    """A message of the conversation, as a text or as blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag(branch("text"))]
        | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag(branch("list"))],
        by_shape(text_or_list, "a string or a list of blocks"),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.content == [] and self.role != "assistant":
            raise refusal(INVALID_VALUE, "content", "content is empty: only an assistant's may be")
        for i, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if _ROLES.get(block.type, self.role) != self.role:
                at, role = f"content.{i}.type", _ROLES[block.type]
                raise refusal(INVALID_COMBINATION, at, f"{at} is {block.type}, which is for messages of role {role}")
        return self

    def as_chat(self) -> Iterator[dict[str, Any]]:
        """One or more of a chat: a tool's result is a message of its own there. Results come first, behind their
        calls."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "assistant":
            yield from _answers(self.content)
        else:
            yield from (block.as_chat() for block in self.content if isinstance(block, ToolResult))
            if others := [block for block in self.content if not isinstance(block, ToolResult)]:
                yield {"role": self.role, "content": _parts(others)}


def _parts(blocks: Iterable[Any]) -> list[Any]:
    return [block.as_chat() if isinstance(block, ImageBlock | ToolReference) else block for block in blocks]


def _answers(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as messages, each with its parts in the order thinking, texts, calls. A part that does not follow
    this order begins another message. If the template has no such messages, `text.histories` joins them."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or _PARTS.index(blocks[end].type) < _PARTS.index(blocks[end - 1].type):
            yield _answer(blocks[begin:end])
            begin = end
    if not blocks:
        yield _answer(())


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    texts, uses = _of_type(TextBlock, blocks), _of_type(ToolUse, blocks)
    thought = "".join(block.thinking for block in _of_type(ThinkingBlock, blocks))
    calls = [use.as_chat() for use in uses]
    return {
        "role": "assistant",
        "content": texts or (None if calls else ""),
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
        **_mark(next((use.cache_control for use in uses if use.cache_control), None)),
    }


def _of_type(kind: type[OneType], blocks: Sequence[Any]) -> list[OneType]:
    return [block for block in blocks if isinstance(block, kind)]


def _mark(mark: CacheControl | None) -> dict[str, Any]:
    return {} if mark is None else {"cache_control": mark}
