"""Untrusted JSON: its depth is known before a parser reads it.

Parsers recurse. One that is stopped by the interpreter's limit has used the whole stack, and objects collected at that
moment cannot run their finalizers: files and processes of other owners are left open.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

MAX_DEPTH: Final = 32
TOO_DEEP: Final = f"it is nested deeper than {MAX_DEPTH} levels, or its brackets do not match"

_NOT_BRACKETS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")


def decode(text: str, type: Any = Any) -> Any:
    """Return the value of `text`, of msgspec's `type`. Raises ValueError for a text that is not JSON, or is nested
    deeper than `MAX_DEPTH`."""
    return msgspec.json.decode(checked(text), type=type)


def checked(text: str) -> bytes:
    """Return the bytes of the text. Raises ValueError if they are nested deeper than `MAX_DEPTH`, or not UTF-8."""
    data = text.encode()
    if may_be_deep(data) and is_deep(brackets_of(outside_strings(data))):
        raise ValueError(TOO_DEEP)
    return data


def may_be_deep(data: bytes) -> bool:
    """False says that a look at its strings is not needed."""
    return data.count(b"[") + data.count(b"{") > MAX_DEPTH


def outside_strings(data: bytes) -> bytes:
    """Return the parts of a JSON text outside its strings."""
    delimited = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(delimited.split(b'"')[::2])


def brackets_of(outside: bytes) -> bytes:
    """Return the brackets and braces of `outside`, JSON text without its strings, in order."""
    return outside.translate(None, _NOT_BRACKETS)


def is_deep(brackets: bytes) -> bool:
    """Return whether these are nested deeper than `MAX_DEPTH`, or do not match. Each pass removes every innermost
    level."""
    brackets = brackets.translate(_SQUARE)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
