"""Frames of a real session with one field changed to a value that an honest peer never sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

VALUES: Final[tuple[Any, ...]] = (
    *(0, -1, 1, 7, 2**31 - 1, 2**31, 2**44, 2**63 - 1, 2**64 - 1, 1e308, float("nan")),
    *("", "x" * 1_000_000, "\n", b"", b"\xff" * 16, b"\xff" * 1_000_000, [], {}, None, True),
)


def plain(frame: msgspec.Struct) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame))


def alterations(frame: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Each value in each place of the frame, with the place's name; and the frame with each field left out."""
    whole = plain(frame)
    for path in _paths(whole):
        for value in VALUES:
            yield f"{type(frame).__name__}{path} = {repr(value)[:40]}", _changed(whole, path, value)
        if path and isinstance(path[-1], str):
            yield f"{type(frame).__name__} without {path}", _without(whole, path)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key != "type":
            yield (*path, key)
            yield from _paths(inner, (*path, key))


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _changed(copy[path[0]], path[1:], new)
    return copy


def _without(value: Any, path: tuple[Any, ...]) -> Any:
    copy = value.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _without(copy[path[0]], path[1:])
    return copy
