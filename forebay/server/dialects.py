"""The two shapes of an answer: a chat's and a completion's, whole and in stream chunks.

Chunks are put together as bytes around parts that are encoded once per request: nothing is validated per token.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import msgspec

from forebay.server.generation import Choice, Generation, Piece
from forebay.server.logprobs import Scored, chat_logprobs, completion_logprobs
from forebay.text.answers.parts import CallArguments, CallBegun, Part, Said, Thought
from forebay.text.token_bytes import TokenBytes

DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode


class Dialect(ABC):
    """One shape of answers: the fields around `choices`, and events that are put together around them. `addition` is
    what an event calls that which it adds to a choice."""

    addition: ClassVar[bytes]

    def __init__(self, fields: dict[str, Any], table: TokenBytes, *, include_usage: bool) -> None:
        """`fields` are those before `choices`."""
        self._table = table
        self._include_usage = include_usage
        start = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._before = start + b'{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = start + b'],"usage":'

    @abstractmethod
    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        """The body of an answer that is not streamed; `texts`, `parts` and `scores` by choice."""

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """What comes before a choice's first piece."""

    @abstractmethod
    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is text and nothing else."""

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Zero, one or two events."""

    def closing(self, generation: Generation) -> bytes:
        """The end of a stream."""
        if not self._include_usage:
            return DONE
        return self._usage_start + _encode(generation.usage()) + b"}\n\n" + DONE

    def _event(self, choice: Choice, added: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return (
            b'%b%d,"%b":%b,"logprobs":%b,"finish_reason":%b%b'
            % (self._before, choice.index, self.addition, added, logprobs, finish, self._after)
        )  # fmt: skip


class ChatDialect(Dialect):
    addition = b"delta"

    def __init__(self, fields: dict[str, Any], table: TokenBytes, *, logprobs: bool, include_usage: bool) -> None:
        super().__init__({**fields, "object": "chat.completion.chunk"}, table, include_usage=include_usage)
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
                "logprobs": chat_logprobs(self._table, tokens) if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        return _encode({**self._whole, "choices": choices, "usage": generation.usage()})

    def opening(self, choice: Choice) -> bytes:
        return self._event(choice, b'{"role":"assistant","content":""}')

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, b'{"content":%b}' % _encode(text))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        added = [delta for part in piece.parts if (delta := delta_of(part))]
        if not added and (piece.text or piece.tokens):
            added.append({"content": piece.text})
        out = b""
        for number, delta in enumerate(added):
            scored = self._logprobs and number == 0
            scores = _encode(chat_logprobs(self._table, piece.tokens)) if scored else b"null"
            out += self._event(choice, _encode(delta), scores)
        if piece.finish is not None:
            out += self._event(choice, b"{}", finish=_encode(piece.finish))
        return out


def _begun(part: CallBegun, arguments: str) -> dict[str, Any]:
    function = {"name": part.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def delta_of(part: Part) -> dict[str, Any]:
    """What a stream says of a part; nothing of a call's end."""
    match part:
        case Said(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallBegun(call, _):
            return {"tool_calls": [{"index": call, **_begun(part, "")}]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
        case _:
            return {}


def message_of(parts: list[Part]) -> dict[str, Any]:
    """A whole answer of which all parts are known."""
    said = "".join(part.text for part in parts if isinstance(part, Said))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments.setdefault(part.call, []).append(part.text)
    calls = [_begun(part, "".join(arguments.get(part.call, ()))) for part in parts if isinstance(part, CallBegun)]
    message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


class CompletionDialect(Dialect):
    """`num_top` is None where no log-probabilities are wanted; `echo` puts the prompt in front."""

    addition = b"text"

    def __init__(
        self, fields: dict[str, Any], table: TokenBytes, *, num_top: int | None, echo: bool, include_usage: bool
    ) -> None:
        self._fields = {**fields, "object": "text_completion"}
        super().__init__(self._fields, table, include_usage=include_usage)
        self._num_top = num_top
        self._echo = echo

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        choices = []
        for choice, text, tokens in zip(generation.choices, texts, scores, strict=True):
            before = self._prompt_text(choice)
            choices.append(
                {
                    "index": choice.index,
                    "text": before + text,
                    "logprobs": self._scores(choice, tokens, len(before)),
                    "finish_reason": choice.finish,
                }
            )
        return _encode({**self._fields, "choices": choices, "usage": generation.usage()})

    def opening(self, choice: Choice) -> bytes:
        text = self._prompt_text(choice)
        return self.text(choice, text) if text else b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, _encode(text))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish):
            return b""
        scores = _encode(self._tokens(piece.tokens)) if piece.tokens else b"null"
        finish = b"null" if piece.finish is None else _encode(piece.finish)
        return self._event(choice, _encode(piece.text), scores, finish)

    def _prompt_text(self, choice: Choice) -> str:
        if not self._echo:
            return ""
        if choice.prompt.text is not None and self._num_top is None:
            return choice.prompt.text
        # As its tokens spell it, so that text_offset points into it.
        raw = b"".join(map(self._table.in_text, choice.prompt.token_ids))
        return raw.decode("utf-8", "replace")

    def _scores(self, choice: Choice, tokens: list[Scored], shift: int) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        generated = [Scored(token.token_id, token.offset + shift, token.score) for token in tokens]
        return self._tokens([*choice.prompt_scores(), *generated] if self._echo else generated)

    def _tokens(self, tokens: list[Scored]) -> dict[str, Any]:
        return completion_logprobs(self._table, tokens, self._num_top or 0)
