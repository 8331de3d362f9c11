"""What chats and completions have in common: chunks of choices.

They are put together as bytes around parts that are encoded once per request.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.server.dialects.dialect import Dialect
from forebay.server.errors import DONE, error_ending
from forebay.server.generation import Choice, Generation
from forebay.text.token_bytes import TokenBytes

encode: Final = msgspec.json.Encoder().encode


class ChunkDialect(Dialect):
    """The fields around `choices`, and events that are put together around them. `addition` is what an event calls that
    which it adds to a choice."""

    addition: ClassVar[bytes]

    def __init__(self, fields: dict[str, Any], table: TokenBytes, *, include_usage: bool) -> None:
        """`fields` are those before `choices`."""
        self._table = table
        self._include_usage = include_usage
        start = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._before = start + b'{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage_start = start + b'],"usage":'

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return DONE
        return self._usage_start + encode(generation.usage()) + b"}\n\n" + DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _event(self, choice: Choice, added: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return (
            b'%b%d,"%b":%b,"logprobs":%b,"finish_reason":%b%b'
            % (self._before, choice.index, self.addition, added, logprobs, finish, self._after)
        )  # fmt: skip
