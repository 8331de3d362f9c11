"""The process that compiles clients' grammars as the engine will, and begins outputs, to see whether it can.

python -m forebay.grammar.check_worker FD      (started by `checking`; FD is its end of the socket pair)
"""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec
from llguidance import LLTokenizer

from forebay.base.confined import serve
from forebay.base.errors import InvalidRequest
from forebay.grammar.checking import LIMITS
from forebay.grammar.dry_run import DryRun
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar

NICENESS: Final = 10  # who streams goes first

_decode_vocabulary: Final = msgspec.msgpack.Decoder(Vocabulary).decode
_decode_grammar: Final = msgspec.msgpack.Decoder(Grammar).decode


def _in_bytes(text: str, by_bytes: dict[bytes, int]) -> list[int]:
    """Tokens of a byte each: not those of the model, but of the same text."""
    return [by_bytes[byte] for at in text.encode() if (byte := bytes([at])) in by_bytes]


class Worker:
    """Answers questions one after the other, of which the first is the vocabulary."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._dry_run: DryRun | None = None

    def answer(self, question: bytes) -> bytes:
        """Return the fault of a grammar; "" if it has none."""
        if self._tokenizer is None or self._dry_run is None:
            vocabulary = _decode_vocabulary(question)
            by_bytes = {spelled: token for token, spelled in enumerate(vocabulary.tokens) if len(spelled) == 1}
            self._tokenizer = vocabulary.tokenizer(lambda text: _in_bytes(text, by_bytes))
            self._dry_run = DryRun(vocabulary)
            return b""
        try:
            grammar = _decode_grammar(question)
            self._dry_run.run(grammar, self._tokenizer)
        except InvalidRequest as error:
            return error.message.encode("utf-8", "replace")
        return b""


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(int(sys.argv[1]), LIMITS, Worker().answer)
