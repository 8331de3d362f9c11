"""Answers of /v1/responses, which are made of items, and their numbered events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from forebay.base import json_text
from forebay.base.errors import ForebayError
from forebay.engine.client.choice import Choice, Piece
from forebay.engine.client.scores import Scored
from forebay.http.errors import shown
from forebay.server.api.core.generation import CachedDetails, CacheUsage, Generation, ReasoningDetails
from forebay.server.api.core.items import Call, Item, ItemsDialect, Kinds, items_of, parts_of, the_choice
from forebay.server.api.core.logprobs import ScoredToken, text_logprobs
from forebay.server.api.openai.responses_items import sealed
from forebay.server.api.openai.responses_tools import OfferedTool
from forebay.server.protocol.tools import input_of
from forebay.text.answers.parts import CallArguments, Part, Said, Thought
from forebay.text.token_bytes import TokenBytes


class ResponseUsage(msgspec.Struct, kw_only=True):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    cache: CacheUsage


class ResponseItem(TypedDict):
    """A message has a `role`, thinking a `summary` and perhaps `encrypted_content`, and both `content`; a call has
    `call_id`, `name`, for a tool of a namespace `namespace`, and `arguments` or for a tool that takes one text
    `input`; the search of tools has `call_id`, `execution` and its arguments as an object."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call", "tool_search_call", "compaction"]
    status: NotRequired[Literal["completed", "incomplete"]]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    encrypted_content: NotRequired[str | None]
    call_id: NotRequired[str]
    namespace: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str | dict[str, Any]]
    execution: NotRequired[Literal["client"]]
    input: NotRequired[str]


class ModelResponse(TypedDict):
    """The fields of the request that are not long come back in it. `metadata.ignored`: tools that are left out."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[ResponseItem]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    store: bool
    previous_response_id: str | None


_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
# What an item's text is called in events, and in that of its end.
_TEXTS: Final = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_SEARCH: Final = "tool_search_call"  # has no events of its text
_HELD: Final = ("custom_tool_call", _SEARCH)  # come at once
_CALLS: Final = ("function_call", *_HELD)

_encode: Final = msgspec.json.Encoder().encode


def _object_of(text: str) -> dict[str, Any] | str:
    """Return the object that a text of JSON is; the text itself if it is none, as that of a call that was cut off."""
    try:
        found: dict[str, Any] = json_text.decode(text or "{}", type=dict[str, Any])
    except ValueError:
        return text
    return found


@dataclass(slots=True)
class _Written:
    """An item on its way, number `index` of the answer."""

    kind: str
    index: int
    name: str = ""
    namespace: str | None = None
    texts: list[str] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)  # of the tokens of a message, if they are wanted
    item_id: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        self.item_id = f"{_PREFIXES[self.kind]}_{secrets.token_hex(12)}"
        self.call_id = f"call_{secrets.token_hex(12)}"

    def part(self, *, whole: bool) -> dict[str, Any]:
        """The one part of its content."""
        text = "".join(self.texts) if whole else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.scores if whole else []}

    def as_dict(self, status: str, *, seals: bool) -> dict[str, Any]:
        begun = {"id": self.item_id, "type": self.kind, "status": status}
        whole = status != "in_progress"
        text = "".join(self.texts) if whole else ""
        if self.kind == _SEARCH:
            return {**begun, "call_id": self.call_id, "execution": "client", "arguments": _object_of(text)}
        if self.kind in _CALLS:
            named = {"namespace": self.namespace, "name": self.name} if self.namespace else {"name": self.name}
            return {**begun, "call_id": self.call_id, **named, _TEXTS[self.kind][1]: text}
        content = [self.part(whole=True)] if whole else []
        if self.kind == "message":
            return {**begun, "role": "assistant", "content": content}
        return {**begun, "summary": [], "content": content, "encrypted_content": sealed(text) if seals else None}


@dataclass(kw_only=True)
class ResponsesDialect(ItemsDialect):
    """`fields` are the answer's own that do not change. With `seals` thinking comes sealed too. `table` is None if no
    log-probabilities are wanted. `tools` are those of the request, by the names by which the model calls them. `keep`
    is called with the whole response before its end is sent. `first` are items before those that the model writes."""

    kinds = Kinds(said="message", thought="reasoning", called="function_call")

    fields: Mapping[str, Any]
    seals: bool = False
    table: TokenBytes | None = None
    tools: Mapping[str, OfferedTool] = field(default_factory=dict)
    first: Sequence[dict[str, Any]] = ()
    keep: Callable[[dict[str, Any]], None] | None = None
    _number: int = 0  # of the next event
    _open: _Written | None = None
    _written: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0
    _scores: list[ScoredToken] = field(default_factory=list)  # of text that comes next

    def __post_init__(self) -> None:
        self._written, self._count = list(self.first), len(self.first)

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choice = the_choice(generation)
        found = items_of(parts_of(choice, texts[0], parts[0]))
        items = [self._of(item, index) for index, item in enumerate(found, self._count)]
        self._share_scores([item for item in items if item.kind == "message"], scores[0])
        self._written += [item.as_dict("completed", seals=self.seals) for item in items]
        if items and choice.finish == "length":
            self._written[-1]["status"] = "incomplete"
        return _encode(self._ended(generation, choice))

    def _share_scores(self, messages: Sequence[_Written], scores: Sequence[Scored]) -> None:
        """Tokens of text in a row are those of one message."""
        if self.table is None:
            return
        runs = (list(run) for kind, run in groupby(scores, lambda token: token.kind) if kind is Said)
        for item, run in zip(messages, runs, strict=False):
            item.scores += text_logprobs(self.table, run)

    def _of(self, item: Item, index: int) -> _Written:
        match item:
            case Said(text):
                return _Written("message", index, texts=[text])
            case Thought(text):
                return _Written("reasoning", index, texts=[text])
            case Call(name, arguments):
                call = self._call_of(name, index)
                call.texts = [input_of(arguments) if call.kind == "custom_tool_call" else arguments]
                return call

    def _call_of(self, name: str, index: int) -> _Written:
        """Return a call of the tool that the model has named; of a function if no tool has that name."""
        offered = self.tools.get(name)
        if offered is None:
            return _Written("function_call", index, name)
        return _Written(offered.tool.call_type, index, offered.tool.name, offered.namespace)

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if self.table is not None:
            self._scores += text_logprobs(self.table, [token for token in piece.tokens if token.kind is Said])
        return super().chunk(choice, piece)

    def opening(self, generation: Generation) -> bytes:
        begun = {"response": self._response("in_progress", output=[])}
        opened = self._event("response.created", begun) + self._event("response.in_progress", begun)
        return opened + b"".join(self._whole_item(index, item) for index, item in enumerate(self.first))

    def _whole_item(self, index: int, item: dict[str, Any]) -> bytes:
        """The events of an item that comes at once."""
        fields = {"output_index": index, "item": item}
        return self._event("response.output_item.added", fields) + self._event("response.output_item.done", fields)

    def closing(self, generation: Generation) -> bytes:
        try:
            choice = the_choice(generation)
        except ForebayError as error:
            return self.failure(error)
        before = self._end("incomplete" if choice.finish == "length" else "completed")
        ended = self._ended(generation, choice)
        return before + self._event(f"response.{ended['status']}", {"response": ended})

    def failure(self, error: ForebayError) -> bytes:
        failed = self._response("failed", error={"code": error.code, "message": shown(error)})
        return self._event("response.failed", {"response": failed})

    def _call(self, name: str) -> bytes:
        return self._begin(self._call_of(name, self._count))

    def _part(self, part: Part) -> bytes:
        """The text of a tool that takes one comes at once, behind its JSON, and so do the arguments of a search. A call
        that is cut off is `completed` in its event, and the response `incomplete`: opencode sees no other call."""
        if self._open is not None and self._open.kind in _HELD and isinstance(part, CallArguments):
            self._open.texts.append(part.text)
            return b""
        return super()._part(part)

    def _within(self, kind: str, text: str) -> bytes:
        before, item = b"", self._open
        if item is None or item.kind != kind:
            before, item = self._end(), _Written(kind, self._count)
            before += self._begin(item)
        item.texts.append(text)
        return before + self._text_event(item, "delta", "delta", text, self._taken_scores(item))

    def _taken_scores(self, item: _Written) -> list[ScoredToken]:
        """The scores that belong to an item's text as far as it came."""
        if item.kind != "message":
            return []
        taken, self._scores = self._scores, []
        item.scores += taken
        return taken

    def _begin(self, item: _Written) -> bytes:
        self._open = item
        self._count += 1
        begun = {"output_index": item.index, "item": item.as_dict("in_progress", seals=False)}
        return self._event("response.output_item.added", begun) + self._part_event("added")

    def _end(self, status: str = "completed") -> bytes:
        item = self._open
        if item is None:
            return b""
        self._taken_scores(item)
        events = self._held_text(item) if item.kind in _HELD else b""
        if item.kind != _SEARCH:
            events += self._text_event(item, "done", _TEXTS[item.kind][1], "".join(item.texts), item.scores)
            events += self._part_event("done")
        self._open = None
        self._written.append(item.as_dict(status, seals=self.seals))
        return events + self._event(
            "response.output_item.done", {"output_index": item.index, "item": self._written[-1]}
        )

    def _held_text(self, item: _Written) -> bytes:
        """Return the event of a text that comes at once."""
        if item.kind == _SEARCH:
            return b""
        item.texts = [input_of("".join(item.texts))]
        return self._text_event(item, "delta", "delta", item.texts[0])

    def _part_event(self, what: str) -> bytes:
        item = self._open
        if item is None or item.kind in _CALLS:
            return b""
        at = {"item_id": item.item_id, "output_index": item.index, "content_index": 0}
        return self._event(f"response.content_part.{what}", {**at, "part": item.part(whole=what == "done")})

    def _text_event(
        self, item: _Written, what: str, called: str, text: str, scores: Sequence[ScoredToken] = ()
    ) -> bytes:
        kind = f"response.{_TEXTS[item.kind][0]}.{what}".encode()
        more = b"" if item.kind in _CALLS else b',"content_index":0'
        if item.kind == "message":
            more += b',"logprobs":%b' % _encode(scores) if scores else b',"logprobs":[]'
        self._number += 1
        return (
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,"item_id":"%b","output_index":%d%b,"%b":%b}\n\n'
            % (kind, kind, self._number - 1, item.item_id.encode(), item.index, more, called.encode(), _encode(text))
        )  # fmt: skip

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        event = _encode({"type": kind, "sequence_number": self._number - 1, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), event)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return response_of(self.fields, status, **{"output": self._written, **more})

    def _ended(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        if choice.finish != "length":
            return self._finished(generation)
        return self._finished(generation, "incomplete", incomplete_details={"reason": "max_output_tokens"})

    def _finished(self, generation: Generation, status: str = "completed", **more: Any) -> dict[str, Any]:
        """Return the whole response, and keep it."""
        ended = self._response(status, usage=_usage(generation), **more)
        if self.keep is not None:
            self.keep(ended)
        return ended


def response_of(fields: Mapping[str, Any], status: str, **more: Any) -> dict[str, Any]:
    """Return a response with these fields; without `more`, one that has no output yet."""
    return {**fields, "status": status, "error": None, "incomplete_details": None, "usage": None, "output": [], **more}


def _usage(generation: Generation) -> ResponseUsage:
    usage = generation.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details,
        output_tokens=usage.completion_tokens,
        output_tokens_details=usage.completion_tokens_details or ReasoningDetails(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
        weight_version=usage.weight_version,
        adapter=usage.adapter,
        cache=usage.cache,
    )
