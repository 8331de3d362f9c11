"""What a chat template's process is told and answers: length-prefixed msgpack of these types, over a socket pair."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Final, TypeAlias

import msgspec

MAX_OUTPUT_CHARS: Final = 4 << 20
MAX_CPU_S: Final = 1.0  # of compiling, and of each rendering: the kernel ends who takes longer
MAX_MEMORY_BYTES: Final = 256 << 20  # of data, the interpreter's own included

_MAX_ANSWER_BYTES: Final = 4 * MAX_OUTPUT_CHARS + 4096
_LENGTH: Final = struct.Struct(">I")
_BLOCK_BYTES: Final = 1 << 16


class Compile(msgspec.Struct, tag=True):
    """The first frame. `variables` are offered to every rendering."""

    source: str
    variables: dict[str, str]


class Render(msgspec.Struct, tag=True):
    messages: list[Any]
    variables: dict[str, Any]


class Compiled(msgspec.Struct, tag=True):
    pass


class Rendered(msgspec.Struct, tag=True):
    text: str


class Failed(msgspec.Struct, tag=True):
    """`why` continues the sentence "the chat template ..."."""

    why: str


Question: TypeAlias = Compile | Render
Answer: TypeAlias = Compiled | Rendered | Failed

encode: Final = msgspec.msgpack.Encoder().encode
decode_question: Final = msgspec.msgpack.Decoder(Question).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode


def send(sock: socket.socket, content: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(content)) + content)


def receive_question(sock: socket.socket) -> bytes | None:
    """None where nobody is left to ask."""
    head = _read(sock, _LENGTH.size, None)
    return None if head is None else _read(sock, _LENGTH.unpack(head)[0], None)


def receive_answer(sock: socket.socket, timeout_s: float) -> bytes | None:
    """None where the process has ended, or answers what no template can have written. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    head = _read(sock, _LENGTH.size, deadline)
    if head is None or _LENGTH.unpack(head)[0] > _MAX_ANSWER_BYTES:
        return None
    return _read(sock, _LENGTH.unpack(head)[0], deadline)


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        block = sock.recv(min(_BLOCK_BYTES, size - len(content)))
        if not block:
            return None
        content += block
    return bytes(content)
