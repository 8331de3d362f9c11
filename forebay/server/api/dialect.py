"""The interface of dialects to an answer, and the chunks of choices that chats and completions share.

Chunks are put together as bytes around parts that are encoded once per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice, Piece
from forebay.engine.scores import Scored
from forebay.server.api.generation import Generation
from forebay.server.api.logprobs import prompt_logprobs
from forebay.server.http.errors import DONE, error_ending
from forebay.text.answers.parts import Part
from forebay.text.token_bytes import TokenBytes


class Dialect(ABC):
    """One shape of answers, whole and in a stream of events. Made for one request; nothing is validated per token."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"  # of a stream

    @abstractmethod
    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        """The body of an answer that is not streamed; `texts`, `parts` and `scores` by choice."""

    @abstractmethod
    def opening(self, generation: Generation) -> bytes:
        """Return the events before all pieces. The first piece is there, so the effect of the prefix cache is known."""

    @abstractmethod
    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is text and nothing else."""

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of a piece, or none."""

    @abstractmethod
    def closing(self, generation: Generation) -> bytes:
        """The end of a stream."""

    @abstractmethod
    def failure(self, error: ForebayError) -> bytes:
        """The end of a stream that failed, whose status has been sent."""


encode: Final = msgspec.json.Encoder().encode


class ChunkDialect(Dialect):
    """The fields around `choices`, and events that are put together around them. `addition` is what an event calls that
    which it adds to a choice."""

    addition: ClassVar[bytes]

    def __init__(
        self,
        fields: dict[str, Any],
        table: TokenBytes,
        *,
        include_usage: bool,
        usage_of_each: bool = False,
        num_prompt_top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        """`fields` are those before `choices`. With `usage_of_each` every event says what came so far; `num_prompt_top`
        is None where no log-probabilities of the prompt are wanted. With `token_ids` the answer has those of the prompt
        and of each choice."""
        self._table = table
        self._include_usage = include_usage
        start = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._before = start + b'{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = start + b'],"usage":'
        self._usage_of_each = usage_of_each
        self._running: Generation | None = None  # where each event tells its usage
        self._num_prompt_top = num_prompt_top
        self._token_ids = token_ids
        self._num_ids: dict[int, int] = {}  # of a stream, by choice: token ids that were sent

    def of_prompt(self, choice: Choice) -> dict[str, Any]:
        if self._num_prompt_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._table, choice.prompt_scores(), self._num_prompt_top)}

    def ids_of(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": choice.token_ids} if self._token_ids else {}

    def prompt_ids_of(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt.token_ids} if self._token_ids else {}

    def has_new_ids(self, choice: Choice) -> bool:
        return self._token_ids and self._num_ids.get(choice.index, 0) < len(choice.token_ids)

    def _new_ids(self, choice: Choice) -> bytes:
        """The field with the token ids of a choice that were not sent yet."""
        ids = choice.token_ids[self._num_ids.get(choice.index, 0) :]
        self._num_ids[choice.index] = len(choice.token_ids)
        return b',"token_ids":%b' % encode(ids)

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        return self._usage_start + encode(generation.usage()) + b"}\n\n" + DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _event(self, choice: Choice, added: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        ids = self._new_ids(choice) if self._token_ids else b""
        after = self._after if self._running is None else b'}],"usage":%b}\n\n' % encode(self._running.usage())
        return (
            b'%b%d,"%b":%b,"logprobs":%b,"finish_reason":%b%b%b'
            % (self._before, choice.index, self.addition, added, logprobs, finish, ids, after)
        )  # fmt: skip
