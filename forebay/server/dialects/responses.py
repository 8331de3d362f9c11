"""/v1/responses: OpenAI's responses, which are made of items, and their numbered events."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice
from forebay.engine.scores import Scored
from forebay.server.answering.generation import Generation
from forebay.server.dialects.items import Call, Item, ItemsDialect, Kinds, items_of, parts_of, the_choice
from forebay.server.dialects.responses_request import sealed
from forebay.server.http.errors import shown
from forebay.text.answers.parts import Part, Said, Thought

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
# What an item's text is called in events, and the fields of these beside the text.
_TEXTS: Final = {
    "message": ("output_text", b',"content_index":0,"logprobs":[]'),
    "reasoning": ("reasoning_text", b',"content_index":0'),
    "function_call": ("function_call_arguments", b""),
}

_encode: Final = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Written:
    """An item on its way, number `index` of the answer."""

    kind: str
    index: int
    name: str = ""
    texts: list[str] = field(default_factory=list)
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
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_dict(self, status: str, *, seals: bool) -> dict[str, Any]:
        begun = {"id": self.item_id, "type": self.kind, "status": status}
        whole = status != "in_progress"
        text = "".join(self.texts) if whole else ""
        if self.kind == "function_call":
            return {**begun, "call_id": self.call_id, "name": self.name, "arguments": text}
        content = [self.part(whole=True)] if whole else []
        if self.kind == "message":
            return {**begun, "role": "assistant", "content": content}
        return {**begun, "summary": [], "content": content, "encrypted_content": sealed(text) if seals else None}


@dataclass(kw_only=True)
class ResponsesDialect(ItemsDialect):
    """`fields` are the answer's own that do not change. With `seals` thinking comes sealed too."""

    kinds = Kinds(said="message", thought="reasoning", called="function_call")

    fields: Mapping[str, Any]
    seals: bool = False
    _number: int = 0  # of the next event
    _open: _Written | None = None
    _written: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choice = the_choice(generation)
        items = [_of(item, index) for index, item in enumerate(items_of(parts_of(choice, texts[0], parts[0])))]
        self._written = [item.as_dict("completed", seals=self.seals) for item in items]
        if items and choice.finish == "length":
            self._written[-1]["status"] = "incomplete"
        return _encode(self._ended(generation, choice))

    def opening(self, generation: Generation) -> bytes:
        begun = {"response": self._response("in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

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
        return self._begin(_Written("function_call", self._count, name))

    def _within(self, kind: str, text: str) -> bytes:
        before, item = b"", self._open
        if item is None or item.kind != kind:
            before, item = self._end(), _Written(kind, self._count)
            before += self._begin(item)
        item.texts.append(text)
        return before + self._text_event(item, "delta", "delta", text)

    def _begin(self, item: _Written) -> bytes:
        self._open = item
        self._count += 1
        begun = {"output_index": item.index, "item": item.as_dict("in_progress", seals=False)}
        return self._event("response.output_item.added", begun) + self._part_event("added")

    def _end(self, status: str = "completed") -> bytes:
        item = self._open
        if item is None:
            return b""
        called = "arguments" if item.kind == "function_call" else "text"
        events = self._text_event(item, "done", called, "".join(item.texts))
        events += self._part_event("done")
        self._open = None
        self._written.append(item.as_dict(status, seals=self.seals))
        return events + self._event(
            "response.output_item.done", {"output_index": item.index, "item": self._written[-1]}
        )

    def _part_event(self, what: str) -> bytes:
        item = self._open
        if item is None or item.kind == "function_call":
            return b""
        at = {"item_id": item.item_id, "output_index": item.index, "content_index": 0}
        return self._event(f"response.content_part.{what}", {**at, "part": item.part(whole=what == "done")})

    def _text_event(self, item: _Written, what: str, called: str, text: str) -> bytes:
        name, more = _TEXTS[item.kind]
        kind = f"response.{name}.{what}".encode()
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
        changing = {"error": None, "incomplete_details": None, "usage": None, "output": self._written}
        return {**self.fields, "status": status, **changing, **more}

    def _ended(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        if choice.finish != "length":
            return self._response("completed", usage=_usage(generation))
        why = {"reason": "max_output_tokens"}
        return self._response("incomplete", incomplete_details=why, usage=_usage(generation))


def _of(item: Item, index: int) -> _Written:
    match item:
        case Said(text):
            return _Written("message", index, texts=[text])
        case Thought(text):
            return _Written("reasoning", index, texts=[text])
        case Call(name, arguments):
            return _Written("function_call", index, name, [arguments])


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
        "weight_version": usage["weight_version"],
        "cache": usage["cache"],
    }
