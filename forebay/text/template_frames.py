"""Messages to and from a chat template's process: msgpack of these types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from forebay.base.confined import Limits

MAX_OUTPUT_CHARS: Final = 4 << 20
LIMITS: Final = Limits(cpu_s=1.0, memory_bytes=256 << 20, answer_bytes=4 * MAX_OUTPUT_CHARS + 4096)
"""Of compiling, and of each rendering."""


class Compile(msgspec.Struct, tag=True):
    """The first frame. `variables` are offered to every rendering."""

    source: str
    variables: dict[str, str]


class Render(msgspec.Struct, tag=True):
    """Request to render messages with the compiled template."""

    messages: list[Any]
    variables: dict[str, Any]


class Compiled(msgspec.Struct, tag=True):
    """Answer to a template that compiled. `variables` are those that it reads and does not set before."""

    variables: list[str]


class Rendered(msgspec.Struct, tag=True):
    """Answer with the rendered prompt."""

    text: str


class Failed(msgspec.Struct, tag=True):
    """`why` continues the sentence "the chat template ..."."""

    why: str


Question: TypeAlias = Compile | Render
Answer: TypeAlias = Compiled | Rendered | Failed

encode: Final = msgspec.msgpack.Encoder().encode
decode_question: Final = msgspec.msgpack.Decoder(Question).decode
decode_answer: Final[Callable[[bytes], Answer]] = msgspec.msgpack.Decoder(Answer).decode
