"""The process that compiles clients' grammars, to see whether an engine can.

python -m forebay.grammar.check_worker FD      (started by `checking`; FD is its end of the socket pair)
"""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from forebay.base.confined import serve
from forebay.base.errors import InvalidRequest
from forebay.grammar.checking import LIMITS
from forebay.grammar.compiler import check
from forebay.requests.sampling_params import Grammar

NICENESS: Final = 10  # who streams goes first

_decode: Final = msgspec.msgpack.Decoder(Grammar).decode


def answer(question: bytes) -> bytes:
    """What is wrong with it; nothing where nothing is."""
    try:
        check(_decode(question))
    except InvalidRequest as error:
        return error.message.encode("utf-8", "replace")
    return b""


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(int(sys.argv[1]), LIMITS, answer)
