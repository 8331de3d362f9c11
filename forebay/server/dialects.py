"""The two shapes of an answer: a chat's and a completion's, whole and in stream chunks.

Chunks are put together as bytes around parts that are encoded once per request: nothing is validated per token.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from forebay.server.generation import Choice, Generation, Piece
from forebay.server.logprobs import Scored, chat_logprobs, completion_logprobs
from forebay.text.token_bytes import TokenBytes

DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode


class Dialect(Protocol):
    def whole(self, generation: Generation, texts: list[str], scores: list[list[Scored]]) -> bytes:
        """The body of an answer that is not streamed; `texts` and `scores` by choice."""

    def opening(self, choice: Choice) -> bytes:
        """What comes before a choice's first piece."""

    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is text and nothing else."""

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Zero, one or two events."""

    def closing(self, generation: Generation) -> bytes:
        """The end of a stream."""


class _Envelope:
    """The fields around `choices`."""

    def __init__(self, answer_id: str, kind: str, created: int, model: str, include_usage: bool) -> None:
        self.fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._include_usage = include_usage
        start = _encode(self.fields)[:-1]
        self.before = b"data: " + start + b',"choices":[{"index":'
        self.after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = b"data: " + start + b',"choices":[],"usage":'

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        return self._usage_start + _encode(generation.usage()) + b"}\n\n" + DONE


class ChatDialect:
    def __init__(
        self, answer_id: str, created: int, model: str, table: TokenBytes, *, logprobs: bool, include_usage: bool
    ) -> None:
        self._table = table
        self._logprobs = logprobs
        self._chunk = _Envelope(answer_id, "chat.completion.chunk", created, model, include_usage)
        self._whole = {**self._chunk.fields, "object": "chat.completion"}

    def whole(self, generation: Generation, texts: list[str], scores: list[list[Scored]]) -> bytes:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": chat_logprobs(self._table, tokens) if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice, text, tokens in zip(generation.choices, texts, scores, strict=True)
        ]
        return _encode({**self._whole, "choices": choices, "usage": generation.usage()})

    def opening(self, choice: Choice) -> bytes:
        return self._event(choice, b'{"role":"assistant","content":""}', b"null", b"null")

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, b'{"content":%b}' % _encode(text), b"null", b"null")

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        out = b""
        if piece.text or piece.tokens:
            scores = _encode(chat_logprobs(self._table, piece.tokens)) if self._logprobs else b"null"
            out = self._event(choice, b'{"content":' + _encode(piece.text) + b"}", scores, b"null")
        if piece.finish is not None:
            out += self._event(choice, b"{}", b"null", _encode(piece.finish))
        return out

    def closing(self, generation: Generation) -> bytes:
        return self._chunk.closing(generation)

    def _event(self, choice: Choice, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        envelope = self._chunk
        return (
            b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b'
            % (envelope.before, choice.index, delta, logprobs, finish, envelope.after)
        )  # fmt: skip


class CompletionDialect:
    """`num_top` is None where no log-probabilities are wanted; `echo` puts the prompt in front."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        table: TokenBytes,
        *,
        num_top: int | None,
        echo: bool,
        include_usage: bool,
    ) -> None:
        self._table = table
        self._num_top = num_top
        self._echo = echo
        self._envelope = _Envelope(answer_id, "text_completion", created, model, include_usage)

    def whole(self, generation: Generation, texts: list[str], scores: list[list[Scored]]) -> bytes:
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
        return _encode({**self._envelope.fields, "choices": choices, "usage": generation.usage()})

    def opening(self, choice: Choice) -> bytes:
        text = self._prompt_text(choice)
        return self._event(choice, _encode(text), b"null", b"null") if text else b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._event(choice, _encode(text), b"null", b"null")

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish):
            return b""
        scores = _encode(self._tokens(piece.tokens, 0)) if piece.tokens else b"null"
        finish = b"null" if piece.finish is None else _encode(piece.finish)
        return self._event(choice, _encode(piece.text), scores, finish)

    def closing(self, generation: Generation) -> bytes:
        return self._envelope.closing(generation)

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
        return self._tokens([*choice.prompt_scores(), *generated] if self._echo else generated, 0)

    def _tokens(self, tokens: list[Scored], shift: int) -> dict[str, Any]:
        return completion_logprobs(self._table, tokens, self._num_top or 0)

    def _event(self, choice: Choice, text: bytes, logprobs: bytes, finish: bytes) -> bytes:
        envelope = self._envelope
        return (
            b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b'
            % (envelope.before, choice.index, text, logprobs, finish, envelope.after)
        )  # fmt: skip
