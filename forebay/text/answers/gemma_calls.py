"""Calls as Gemma 4 writes them: `call:name{key:value, ...}`, texts between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from forebay.text.answers.answer import Answer
from forebay.text.answers.argument_types import ArgumentType, argument_type
from forebay.text.answers.calls import MAX_HEAD_CHARS, TOOL_NAME
from forebay.text.answers.cursor import Cursor, Reading, Sink, json_string, markers_of
from forebay.text.answers.python_values import atom, quoted

TEXT_MARK: Final = '<|"|>'
_CLOSES: Final = "<tool_call|>"
_SEPARATORS: Final = re.compile(r"[\s,]+")
_MAX_DEPTH: Final = 64
_MAX_SPACE: Final = 16  # between the end of a text and what follows it

Kinds: TypeAlias = Callable[[str], ArgumentType]
"""What the tool takes as an argument."""
_ANY: Final = ArgumentType()


def gemma_calls(answer: Answer, known: bool) -> Reading[None]:
    """Read one call; a bracket that is missing at its end is added."""
    cursor = answer.cursor
    yield from cursor.spaces()
    if not (yield from cursor.literal("call:")):
        return
    head: list[str] = []
    marker = yield from cursor.until(markers_of("{"), head.append, MAX_HEAD_CHARS)
    name = "".join(head).strip()
    if not marker or not TOOL_NAME.fullmatch(name) or (known and name not in answer.tools):
        return
    tool: Any = answer.tools.get(name, {})
    answer.begin(name)
    yield from _object(cursor, answer.argue, 0, lambda key: argument_type(tool, key))
    answer.end()


def _object(cursor: Cursor, sink: Sink, depth: int, kinds: Kinds) -> Reading[bool]:
    """Read members behind the first bracket; False if the last one is missing."""
    sink("{")
    between = ""
    while True:
        yield from cursor.run(_SEPARATORS, lambda _: None)
        if (yield from cursor.literal("}")):
            sink("}")
            return True
        key = yield from _key(cursor)
        if not key:
            return _cut_short(cursor, sink, "}")
        sink(f"{between}{quoted(key)}: ")
        between = ", "
        if not (yield from _value(cursor, sink, depth + 1, kinds(key))):
            return _cut_short(cursor, sink, "}")


def _list(cursor: Cursor, sink: Sink, depth: int) -> Reading[bool]:
    """Read items behind the first bracket."""
    sink("[")
    between = ""
    while True:
        yield from cursor.run(_SEPARATORS, lambda _: None)
        if (yield from cursor.literal("]")):
            sink("]")
            return True
        if (yield from cursor.peek()) in ("", "}") or (yield from cursor.peek(len(_CLOSES))) == _CLOSES:
            return _cut_short(cursor, sink, "]")
        sink(between)
        between = ", "
        if not (yield from _value(cursor, sink, depth + 1)):
            return _cut_short(cursor, sink, "]")


def _cut_short(cursor: Cursor, sink: Sink, bracket: str) -> bool:
    """Add the bracket that the model left out. An answer that was cut off gets none."""
    if not cursor.ended:
        sink(bracket)
    return False


def _key(cursor: Cursor) -> Reading[str]:
    """A key and its colon; "" if there is none."""
    key: list[str] = []
    if (yield from cursor.peek()) == '"':
        whole = yield from json_string(cursor, key.append)
        name = _decoded("".join(key)) if whole else ""
    elif (yield from cursor.literal(TEXT_MARK)):
        yield from cursor.until(markers_of(TEXT_MARK), key.append, MAX_HEAD_CHARS)
        name = "".join(key)
    else:
        marker = yield from cursor.until(markers_of(":", ",", "}", _CLOSES), key.append, MAX_HEAD_CHARS)
        cursor.put_back(marker)
        name = "".join(key).strip()
    yield from cursor.spaces()
    return name if (yield from cursor.literal(":")) else ""


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _value(cursor: Cursor, sink: Sink, depth: int, kind: ArgumentType = _ANY) -> Reading[bool]:
    """False if it did not end, or has too many brackets."""
    yield from cursor.spaces()
    char = yield from cursor.peek()
    if char and char in "{[":
        cursor.take(1)
        if depth > _MAX_DEPTH:
            sink("null")
            return False
        nested = _object(cursor, sink, depth, lambda _: _ANY) if char == "{" else _list(cursor, sink, depth)
        return (yield from nested)
    if char == '"':
        return (yield from json_string(cursor, sink))
    if (yield from cursor.literal(TEXT_MARK)):
        return (yield from _text(cursor, sink))
    word: list[str] = []
    marker = yield from cursor.until(markers_of(",", "}", "]", _CLOSES), word.append)
    cursor.put_back(marker)
    said = "".join(word).strip()
    is_text = kind.text and not (kind.nullable and said == "null")
    sink(quoted(said) if is_text else atom(said))
    return bool(marker)


def _text(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """A text behind its first mark. A mark that nothing of the call follows is a quotation mark in it."""
    sink('"')
    while (yield from cursor.until(markers_of(TEXT_MARK), lambda text: sink(quoted(text)[1:-1]))):
        if (yield from _ends_here(cursor)):
            sink('"')
            return True
        sink('\\"')
    return False


def _ends_here(cursor: Cursor) -> Reading[bool]:
    count = 1
    while (behind := (yield from cursor.peek(count))).isspace() and len(behind) == count and count < _MAX_SPACE:
        count += 1
    following = behind.strip()
    if following == "<":
        return (yield from cursor.peek(count - 1 + len(_CLOSES))).endswith(_CLOSES)
    return not following or following in ",}]"
