"""The process that decodes clients' images: Pillow in bounded memory, ended by the kernel when it takes too long.

python -m forebay.server.images.worker FD      (started by `decoding`; FD is its end of the socket pair)
"""

from __future__ import annotations

import os
import sys
from typing import Final

from forebay.base.confined import serve
from forebay.base.heap import give_back_freed_memory
from forebay.server.images.cutting import tiles_of
from forebay.server.images.frames import LIMITS, Decode, Decoded, Refused, decode_question, encode
from forebay.server.images.sources import Unreadable, data_of

NICENESS: Final = 10  # who streams goes first


def answer(question: bytes) -> bytes:
    """Return the encoded answer to an encoded question."""
    answered = encode(_answer(decode_question(question)))
    give_back_freed_memory()
    return answered


def _answer(question: Decode) -> Decoded | Refused:
    try:
        content = data_of(question.data_url, question.max_bytes) if question.data_url else question.file
        return Decoded(*tiles_of(content, question.tiling, splits=question.splits))
    except Unreadable as error:
        return Refused(str(error))
    except MemoryError:
        return Refused(f"needs more than {LIMITS.memory_bytes >> 20} MiB to be decoded: send a smaller one")


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(int(sys.argv[1]), LIMITS, answer)
