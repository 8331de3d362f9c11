"""/v1/chat/completions: messages, and the deltas of which they are made."""

from __future__ import annotations

import secrets
from typing import Any

from forebay.engine.choice import Choice, Piece
from forebay.engine.scores import Scored
from forebay.server.answering.generation import Generation
from forebay.server.answering.logprobs import chat_logprobs
from forebay.server.dialects.chunks import ChunkDialect, encode
from forebay.server.dialects.items import Call, items_of
from forebay.text.answers.parts import CallArguments, CallBegun, Part, Said, Thought
from forebay.text.token_bytes import TokenBytes


class ChatDialect(ChunkDialect):
    addition = b"delta"

    def __init__(self, fields: dict[str, Any], table: TokenBytes, *, logprobs: bool, **around: Any) -> None:
        super().__init__({**fields, "object": "chat.completion.chunk"}, table, **around)
        self._logprobs = logprobs
        self._whole = {**fields, "object": "chat.completion"}

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None}
                if choice.prompt.reading is None
                else message_of(parts[choice.index]),
                "logprobs": self._scores(choice, tokens) if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        of_prompt = self.of_prompt(generation.choices[0])
        return encode({**self._whole, "choices": choices, "usage": generation.usage(), **of_prompt})

    def opening(self, generation: Generation) -> bytes:
        super().opening(generation)
        return b"".join(self._event(choice, b'{"role":"assistant","content":""}') for choice in generation.choices)

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, delta_of(Said(text)))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        added = [delta for part in piece.parts if (delta := delta_of(part))]
        if not added and (piece.text or piece.tokens):
            added.append(delta_of(Said(piece.text)))
        out = b""
        for number, delta in enumerate(added):
            scored = self._logprobs and number == 0
            scores = encode(self._scores(choice, piece.tokens)) if scored else b"null"
            out += self._event(choice, delta, scores)
        if piece.finish is not None:
            out += self._event(choice, b"{}", finish=encode(piece.finish))
        return out

    def _scores(self, choice: Choice, tokens: list[Scored]) -> dict[str, Any]:
        return chat_logprobs(self._table, tokens, read=choice.prompt.reading is not None)


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def delta_of(part: Part) -> bytes:
    """What a stream says of a part; nothing of a call's end."""
    match part:
        case Said(text):
            return b'{"content":%b}' % encode(text)
        case Thought(text):
            return b'{"reasoning_content":%b}' % encode(text)
        case CallArguments(call, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (call, encode(text))
        case CallBegun(call, name):
            return encode({"tool_calls": [{"index": call, **_call(name, "")}]})
        case _:
            return b""


def message_of(parts: list[Part]) -> dict[str, Any]:
    """A whole answer of which all parts are known."""
    items = items_of(parts)
    said = "".join(item.text for item in items if isinstance(item, Said))
    thought = "".join(item.text for item in items if isinstance(item, Thought))
    calls = [_call(item.name, item.arguments) for item in items if isinstance(item, Call)]
    message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message
