"""What chats and completions have in common: chunks of choices.

They are put together as bytes around parts that are encoded once per request.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice
from forebay.server.answering.generation import Generation
from forebay.server.answering.logprobs import prompt_logprobs
from forebay.server.dialects.dialect import Dialect
from forebay.server.http.errors import DONE, error_ending
from forebay.text.token_bytes import TokenBytes

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
    ) -> None:
        """`fields` are those before `choices`. With `usage_of_each` every event says what came so far; `num_prompt_top`
        is None where no log-probabilities of the prompt are wanted."""
        self._table = table
        self._include_usage = include_usage
        start = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._before = start + b'{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = start + b'],"usage":'
        self._usage_of_each = usage_of_each
        self._running: Generation | None = None  # where each event tells its usage
        self._num_prompt_top = num_prompt_top

    def opening(self, generation: Generation) -> bytes:
        if self._usage_of_each:
            self._running = generation
        return b""

    def of_prompt(self, choice: Choice) -> dict[str, Any]:
        if self._num_prompt_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._table, choice.prompt_scores(), self._num_prompt_top)}

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        return self._usage_start + encode(generation.usage()) + b"}\n\n" + DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _event(self, choice: Choice, added: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        after = self._after if self._running is None else b'}],"usage":%b}\n\n' % encode(self._running.usage())
        return (
            b'%b%d,"%b":%b,"logprobs":%b,"finish_reason":%b%b'
            % (self._before, choice.index, self.addition, added, logprobs, finish, after)
        )  # fmt: skip
