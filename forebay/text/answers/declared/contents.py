"""JSON made of what a declared region has between its patterns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from forebay.base import json_text
from forebay.text.answers.argument_types import types_of
from forebay.text.answers.calls import is_json
from forebay.text.answers.cursor import Cursor, Reading, Sink, drop, json_string, json_value, markers_of
from forebay.text.answers.declared.declaration import Content, Json, Lines, Scalar, Tags
from forebay.text.answers.declared.patterns import Match, Pattern, Patterns, find
from forebay.text.answers.declared.trees import literals
from forebay.text.answers.python_values import atom, quoted
from forebay.text.answers.tagged_calls import TextValue

Types = Callable[[str], frozenset[str]]
"""The JSON types that the tool takes as an argument; none if it does not say."""
_WORD: Final = re.compile(r"[\w+\-.]+")
_SPACE: Final = re.compile(r"\s+")
_TEXTS: Final = frozenset({"string", "null"})


def types_in(tool: Any) -> Types:
    """Return the types of the arguments by the schema of a tool's parameters."""
    return lambda argument: types_of(tool, argument)


class Ended(NamedTuple):
    """How a content ended: with the match of the pattern behind it, if that was read, and `whole` if nothing is
    missing."""

    whole: bool
    behind: Match | None = None


def write_content(cursor: Cursor, sink: Sink, content: Content, types: Types, closes: Pattern | None) -> Reading[Ended]:
    """Copy the content as JSON. Texts and pairs are read up to the match of `closes` and with it, JSON up to its last
    bracket."""
    behind = [closes] if closes is not None else []
    match content:
        case Json(lax=False):
            yield from cursor.spaces()
            return Ended((yield from _json(cursor, sink, content)))
        case Tags():
            return (yield from _pairs(cursor, sink, content, types, behind))
        case Lines():
            return (yield from _lines(cursor, sink, content, types, behind))
    held: list[str] = []
    found = yield from find(cursor, Patterns(*behind), held.append)
    sink(_value("".join(held), content, frozenset()))
    return Ended(found is not None or not behind, found)


def _json(cursor: Cursor, sink: Sink, content: Json) -> Reading[bool]:
    if content.plain:
        return (yield from json_value(cursor, sink))
    return (yield from _relaxed(cursor, sink, content))


def _relaxed(cursor: Cursor, sink: Sink, content: Json) -> Reading[bool]:
    """Copy a value of JSON that may have keys without quotes, and texts between marks. False if it does not end."""
    brackets: list[str] = []
    is_key = False  # the next word is one, of an object
    while True:
        yield from cursor.run(_SPACE, drop)
        char = yield from cursor.peek()
        if char in ("{", "["):
            brackets.append(cursor.take(1))
            sink(char)
            is_key = char == "{"
            continue
        if brackets and char in (",", ":"):
            sink(cursor.take(1))
            is_key = char == "," and brackets[-1] == "{"
            continue
        if brackets and char in ("}", "]"):
            brackets.pop()
            sink(cursor.take(1))
        elif not (yield from _leaf(cursor, sink, content, is_key=is_key)):
            return False
        is_key = False
        if not brackets:
            return True


def _leaf(cursor: Cursor, sink: Sink, content: Json, *, is_key: bool) -> Reading[bool]:
    """Copy a value without members, or the key of one."""
    if (delims := (yield from _delims(cursor, content))) is not None:
        return (yield from _between(cursor, sink, delims))
    char = yield from cursor.peek()
    if char == '"':
        return (yield from json_string(cursor, sink))
    if not _WORD.match(char):
        return False
    word: list[str] = []
    yield from cursor.run(_WORD, word.append)
    sink(quoted("".join(word)) if is_key and content.unquoted_keys else atom("".join(word)))
    return True


def _delims(cursor: Cursor, content: Json) -> Reading[tuple[str, str] | None]:
    for delims in content.delims:
        if (yield from cursor.literal(delims[0])):
            return delims
    return None


def _between(cursor: Cursor, sink: Sink, delims: tuple[str, str]) -> Reading[bool]:
    sink('"')
    if not (yield from cursor.until(markers_of(delims[1]), lambda text: sink(quoted(text)[1:-1]))):
        return False
    sink('"')
    return True


class _Members:
    """An object while it is written. With `merges`, members of one name become a list, which is written at the end."""

    def __init__(self, sink: Sink, *, merges: bool) -> None:
        self._sink, self._first = sink, True
        self._merged: dict[str, list[str]] | None = {} if merges else None
        sink("{")

    def begin(self, key: str) -> Sink:
        """Begin a member, and return where its value is written."""
        if self._merged is not None:
            pieces = self._merged.setdefault(key, [])
            pieces.append("")

            def extend(text: str) -> None:
                pieces[-1] += text

            return extend
        self._sink(("" if self._first else ", ") + quoted(key) + ": ")
        self._first = False
        return self._sink

    def end(self, *, whole: bool) -> None:
        if self._merged is not None:
            values = {key: each[0] if len(each) == 1 else f"[{', '.join(each)}]" for key, each in self._merged.items()}
            self._sink(", ".join(f"{quoted(key)}: {value}" for key, value in values.items()))
        if whole:
            self._sink("}")


def _pairs(cursor: Cursor, sink: Sink, tags: Tags, types: Types, behind: list[Pattern]) -> Reading[Ended]:
    members = _Members(sink, merges=tags.merges)
    outside, inside = Patterns(tags.opens, *behind), Patterns(tags.closes, *behind)
    found: Match | None = None
    while (opened := (yield from find(cursor, outside, drop))) is not None:
        found = opened
        if opened.number == 0:
            key = opened.groups.get("key", "")
            found = yield from _write_value(cursor, members.begin(key), tags, types(key), inside)
        if found is None or found.number:
            break
        found = None
    whole = found is not None or (not behind and opened is None)
    members.end(whole=whole)
    return Ended(whole, found)


def _write_value(
    cursor: Cursor, sink: Sink, tags: Tags, types: frozenset[str], ends: Patterns
) -> Reading[Match | None]:
    """Copy a value up to the match that ends it. A text is copied as it comes."""
    if tags.value == Scalar("raw") and types <= _TEXTS:
        value = TextValue(sink, "null" in types)
        found = yield from find(cursor, ends, _trimmed(value.write) if tags.trims else value.write)
        value.end(found is not None)
        return found
    held: list[str] = []
    found = yield from find(cursor, ends, held.append)
    if found is not None:
        text = "".join(held)
        sink(_value(text.rstrip() if tags.trims else text, tags.value, types))
    return found


def _trimmed(sink: Sink) -> Sink:
    """Return a sink that passes on all but the white space at the end."""
    blank: list[str] = []

    def write(text: str) -> None:
        kept = text.rstrip()
        if kept:
            sink("".join(blank) + kept)
            blank.clear()
        if len(kept) < len(text):
            blank.append(text[len(kept) :])

    return write


def _lines(cursor: Cursor, sink: Sink, lines: Lines, types: Types, behind: list[Pattern]) -> Reading[Ended]:
    members = _Members(sink, merges=False)
    ends = Patterns(Pattern(literals([lines.between])), *behind)
    while True:
        held: list[str] = []
        found = yield from find(cursor, ends, held.append)
        line = "".join(held)
        if lines.separator in line and (found is not None or not behind):
            key, _, value = line.partition(lines.separator)
            if lines.strips:
                key, value = key.strip(), value.strip()
            members.begin(key)(_value(value, lines.value, types(key)))
        if found is None or found.number:
            whole = found is not None or not behind
            members.end(whole=whole)
            return Ended(whole, found)


def _value(text: str, content: Content, types: frozenset[str]) -> str:
    """Return the JSON of a value: of the type that its content has, and if that is a text, that the tool takes."""
    match content:
        case Json():
            value = _decoded(text, content)
            if value and not value.startswith('"'):
                return value
            return _coerced(json.loads(value) if value else text.strip(), types)
        case Scalar("int") if _WHOLE_NUMBER.fullmatch(text.strip()):
            return str(int(text))
        case Scalar("float") if (number := _number(text)) is not None:
            return repr(number)
        case Scalar("bool"):
            return "true" if text.strip().lower() in ("true", "1") else "false"
        case Scalar("raw"):
            return _coerced(text, types)
    return _coerced(text.strip(), types)


def _decoded(text: str, content: Json) -> str:
    """Return the JSON of a text in a dialect of it; "" if it is none."""
    if content.plain or (content.lax and not (content.unquoted_keys or content.delims)):
        return text.strip() if is_json(text.strip()) else ""
    cursor, pieces, found = Cursor(), list[str](), list[bool]()

    def read() -> Reading[None]:
        found.append((yield from _relaxed(cursor, pieces.append, content)))
        yield from cursor.spaces()

    cursor.feed(text)
    cursor.ended = True
    next(read(), None)
    value = "".join(pieces)
    return value if found == [True] and cursor.taken == len(text) and is_json(value) else ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _coerced(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text, as the first of these types that it can be; a string if it can be none."""
    made = (make(text.strip()) for name, make in _AS.items() if name in types)
    return next(filter(None, made), quoted(text))


def _as_number(word: str) -> str:
    number = _number(word)
    if number is None:
        return ""
    if _WHOLE_NUMBER.fullmatch(word):
        return str(int(word))
    return word if is_json(word) else repr(number)


def _as_boolean(word: str) -> str:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(word.lower(), "")


def _as_null(word: str) -> str:
    return "null" if word in ("null", "None") else ""


def _as_object(word: str) -> str:
    return word if word.startswith("{") and is_json(word) else ""


def _as_array(word: str) -> str:
    return word if word.startswith("[") and is_json(word) else ""


_WHOLE_NUMBER: Final = re.compile(r"[+-]?\d{1,400}")
_AS: Final = {  # a text as a value of a type; "" if it is none
    "number": _as_number,
    "boolean": _as_boolean,
    "null": _as_null,
    "object": _as_object,
    "array": _as_array,
}


def member(value: str, keys: tuple[str, ...]) -> str | None:
    """Return the JSON that an object has under these keys, character for character; None if it has none."""
    for key in keys:
        if not value.lstrip().startswith("{") or not is_json(value):
            return None
        found = json_text.decode(value, type=dict[str, msgspec.Raw])
        if key not in found:
            return None
        value = bytes(found[key]).decode()
    return value
