"""Messages to and from the process that decodes images: msgpack of these types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from forebay.base.confined import Limits
from forebay.base.pixels import Size
from forebay.server.images.tiling import Tiling

LIMITS: Final = Limits(cpu_s=10.0, memory_bytes=1 << 30, answer_bytes=128 << 20)
"""Of each image. Files of the most pixels take 2 to 4 s and 530 to 860 MiB, but for a WebP with an alpha channel, which
takes 1.6 GiB."""


class Decode(msgspec.Struct, tag=True):
    """An image to cut, into one tile unless it `splits`: a `file`, or the `data_url` of one of at most `max_bytes`.

    Base64 is decoded there as well: that of 20 MB holds the interpreter's lock for 70 ms, and so up all streams."""

    file: bytes
    data_url: str
    max_bytes: int
    tiling: Tiling
    splits: bool


class Decoded(msgspec.Struct, tag=True):
    """The tiles, as in `Tiles`."""

    grid: tuple[int, int]
    sizes: tuple[Size, ...]
    pixels: bytes


class Refused(msgspec.Struct, tag=True):
    """`why` continues a sentence that begins with the image."""

    why: str


Answer: TypeAlias = Decoded | Refused

encode: Final = msgspec.msgpack.Encoder().encode
decode_question: Final = msgspec.msgpack.Decoder(Decode).decode
decode_answer: Final[Callable[[bytes], Answer]] = msgspec.msgpack.Decoder(Answer).decode
