"""How models spell calls of tools: one way of reading each, which formats name the markers of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from forebay.base import json_text
from forebay.text.answers.answer import Answer
from forebay.text.answers.cursor import Cursor, Reading, Sink, drop, json_string, json_value, markers_of
from forebay.text.answers.python_values import python_value, quoted

MAX_HEAD_CHARS: Final = 512  # what stands before a call's arguments
_NAME_CHARS: Final = re.compile(r"[\w.\-/]+")
_NAME: Final = re.compile(r"[\w.\-/]{1,128}")
_ARGUMENTS: Final = ("arguments", "parameters")
_PYTHON_NAMES: Final = ("True", "False", "None")

Body: TypeAlias = Callable[[Answer, bool], Reading[None]]
"""Reads calls behind their first marker; with the flag, only those of tools that there are: it is text otherwise. What
does not become a call stays recorded."""


def objects(answer: Answer, known: bool) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, one or a list of them; members in any order."""
    yield from answer.cursor.spaces()
    in_list = yield from answer.cursor.literal("[")
    yield from _objects(answer, known, in_list=in_list)


def named_objects(answer: Answer, known: bool) -> Reading[None]:
    """Read calls in text, where an object with another first member is not part of a call."""
    yield from _objects(answer, known, in_list=False, name_first=True)


def _objects(answer: Answer, known: bool, *, in_list: bool, name_first: bool = False) -> Reading[None]:
    cursor = answer.cursor
    while True:
        yield from cursor.spaces()
        before = answer.calls
        yield from _object(answer, known, name_first)
        if answer.calls == before:
            return
        yield from cursor.spaces()
        following = yield from cursor.peek()
        if following == "" or following not in (",]" if in_list else ";{"):
            return
        if following != "{":
            cursor.take(1)
        answer.layout()
        if following == "]":
            return


def _object(answer: Answer, known: bool, name_first: bool) -> Reading[None]:
    cursor = answer.cursor
    if not (yield from cursor.literal("{")):
        return
    name, begun = "", False
    held: list[str] = []
    while (member := (yield from _member(answer))) is not None:
        if name_first and not name and member != "name":
            break
        if member == "name" and not name:
            name = yield from _word(answer)
            if not name or (known and name not in answer.tools):
                break
        elif member in _ARGUMENTS and not begun and not held:
            begun = bool(name)
            if begun:
                answer.begin(name)
            if not (yield from json_value(cursor, answer.argue if begun else held.append)):
                break
        elif not (yield from json_value(cursor, drop)):
            break
        yield from cursor.spaces()
        if not (yield from cursor.literal(",")):
            yield from _close_object(answer, name, held, begun)
            return
    if begun:
        answer.end()


def _close_object(answer: Answer, name: str, held: list[str], begun: bool) -> Reading[None]:
    closed = yield from answer.cursor.literal("}")
    if not begun and closed and name:
        answer.begin(name)
        answer.argue("".join(held) or "{}")
        begun = True
    if begun:
        answer.end()


def _member(answer: Answer) -> Reading[str | None]:
    """The name of the next member of an object, its colon taken; None where there is none."""
    word: list[str] = []
    yield from answer.cursor.spaces()
    if not (yield from json_string(answer.cursor, word.append)):
        return None
    yield from answer.cursor.spaces()
    if not (yield from answer.cursor.literal(":")):
        return None
    yield from answer.cursor.spaces()
    return "".join(word)[1:-1]


def _word(answer: Answer) -> Reading[str]:
    """A string of JSON that may be a tool's name; "" where there is none."""
    word: list[str] = []
    if not (yield from json_string(answer.cursor, word.append)):
        return ""
    name = "".join(word)[1:-1]
    return name if _NAME.fullmatch(name) else ""


@dataclass(frozen=True, slots=True)
class Headed:
    """A head with the name, which `head` finds in it, `separator`, JSON; `or_brace`: an object may follow at once."""

    head: str
    separator: str
    or_brace: bool = False

    def __call__(self, answer: Answer, known: bool) -> Reading[None]:
        head: list[str] = []
        ends = (self.separator, "{") if self.or_brace else (self.separator,)
        end = yield from answer.cursor.until(markers_of(*ends), head.append, MAX_HEAD_CHARS)
        if not end:
            return
        match = re.fullmatch(self.head, "".join(head).strip())
        if match is None or (known and match["name"] not in answer.tools):
            return
        if end == "{":
            answer.cursor.put_back(end)
        yield from answer.cursor.spaces()
        answer.begin(match["name"])
        yield from json_value(answer.cursor, answer.argue)
        answer.end()


def list_or(other: Body) -> Body:
    """A list of objects, or what `other` reads."""

    def read(answer: Answer, known: bool) -> Reading[None]:
        yield from answer.cursor.spaces()
        yield from (objects if (yield from answer.cursor.peek()) in ("[", "{") else other)(answer, known)

    return read


def python(answer: Answer, known: bool) -> Reading[None]:
    """`[name(key=value, ...), ...]`, the values Python's literals."""
    yield from answer.cursor.spaces()
    if (yield from answer.cursor.literal("[")):
        yield from _python_calls(answer, known)


def _python_calls(answer: Answer, known: bool) -> Reading[None]:
    cursor = answer.cursor
    while True:
        yield from cursor.spaces()
        name: list[str] = []
        yield from cursor.run(_NAME_CHARS, name.append)
        called = "".join(name)
        if not _NAME.fullmatch(called) or (known and called not in answer.tools):
            return
        if not (yield from cursor.literal("(")):
            return
        answer.begin(called)
        yield from _keywords(answer)
        answer.end()
        yield from cursor.spaces()
        if (yield from cursor.peek()) not in (",", "]"):
            return
        closes = cursor.take(1) == "]"
        answer.layout()
        if closes:
            return


def python_or_objects(answer: Answer, known: bool) -> Reading[None]:
    """Read calls written as Python (`[f(x=1)]`) or as JSON objects, with or without a list around them."""
    cursor = answer.cursor
    yield from cursor.spaces()
    in_list = yield from cursor.literal("[")
    yield from cursor.spaces()
    if (yield from cursor.peek()) == "{":
        yield from _objects(answer, known, in_list=in_list)
    elif in_list:
        yield from _python_calls(answer, known)


def _keywords(answer: Answer) -> Reading[None]:
    """`key=value, ...)` as an object of JSON."""
    cursor, first = answer.cursor, True
    answer.argue("{")
    while True:
        yield from cursor.spaces()
        if (yield from cursor.literal(")")):
            answer.argue("}")
            return
        key: list[str] = []
        yield from cursor.run(_NAME_CHARS, key.append)
        yield from cursor.spaces()
        if not key or not (yield from cursor.literal("=")):
            return
        answer.argue(("" if first else ", ") + quoted("".join(key)) + ": ")
        first = False
        if not (yield from python_value(cursor, answer.argue)):
            return
        yield from cursor.spaces()
        yield from cursor.literal(",")


@dataclass(frozen=True, slots=True)
class Tagged:
    """The name between `opens` and `opened`; keys and values between tags of their own, to the tag `closes`."""

    opens: str
    opened: tuple[str, ...]  # one of them; what comes next may stand in it
    key: str
    key_end: str
    value: str
    value_end: str
    closes: str
    lines: bool = False  # a value stands on lines of its own

    def __call__(self, answer: Answer, known: bool) -> Reading[None]:
        cursor = answer.cursor
        yield from cursor.spaces()
        if not (yield from cursor.literal(self.opens)):
            return
        head: list[str] = []
        marker = yield from cursor.until(markers_of(*self.opened), head.append, MAX_HEAD_CHARS)
        name = "".join(head).strip()
        if not marker or not _NAME.fullmatch(name) or (known and name not in answer.tools):
            return
        answer.begin(name)
        answer.argue("{")
        closed = marker == self.closes
        if not closed:
            closed = yield from self._members(answer, name, marker == self.key)
        if closed or not cursor.ended:  # what is ours to write is whole unless the answer was cut off
            answer.argue("}")
        answer.end()

    def _members(self, answer: Answer, name: str, in_key: bool) -> Reading[bool]:
        """Return whether the call was closed."""
        cursor, first = answer.cursor, True
        while True:
            if not in_key:
                yield from cursor.spaces()
                if (yield from cursor.literal(self.closes)):
                    return True
                if not (yield from cursor.literal(self.key)):
                    return False
            in_key = False
            key: list[str] = []
            if not (yield from cursor.until(markers_of(self.key_end), key.append, MAX_HEAD_CHARS)):
                return False
            if self.value:
                yield from cursor.spaces()
                if not (yield from cursor.literal(self.value)):
                    return False
            argument = "".join(key).strip()
            answer.argue(("" if first else ", ") + quoted(argument) + ": ")
            first = False
            ended = yield from self._value(answer, is_text(answer.tools.get(name, {}), argument))
            if ended in ("", self.closes):
                return bool(ended)
            in_key = ended == self.key

    @property
    def ends_inside(self) -> tuple[str, ...]:
        """Marks that end a value whose own end is missing: the next key, or the end of the call."""
        return tuple(f"\n{tag}" if self.lines else tag for tag in (self.key, self.closes))

    def _value(self, answer: Answer, is_text: bool) -> Reading[str]:
        """The tag that ended it; "" if none did."""
        cursor = answer.cursor
        if self.lines:
            yield from cursor.literal("\n")
        ends = (f"\n{self.value_end}", self.value_end) if self.lines else (self.value_end,)
        held: list[str] = []
        sink: Sink = (lambda text: answer.argue(quoted(text)[1:-1])) if is_text else held.append
        answer.argue('"' if is_text else "")
        ended = yield from cursor.until(markers_of(*ends, *self.ends_inside), sink)
        answer.argue(('"' if ended else "") if is_text else _typed("".join(held)))
        return ended.lstrip("\n")


def is_text(schema: Any, argument: str) -> bool:
    """Return whether a tool takes strings there, and nothing else."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(argument) if isinstance(properties, dict) else None
    found = resolved(found, schema)
    kinds = _kinds(found) if isinstance(found, dict) else set()
    return "string" in kinds and kinds <= {"string", "null"}


def resolved(schema: Any, root: Any) -> Any:
    """A schema, or if it only refers to a definition of the tool's (pydantic's enums do), that definition."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    for word in ("$defs", "definitions"):
        definitions = root.get(word)
        if isinstance(reference, str) and reference.startswith(f"#/{word}/") and isinstance(definitions, dict):
            return definitions.get(reference.removeprefix(f"#/{word}/"), schema)
    return schema


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a schema says, its alternatives' among them, as far as it says them in its first lines; nobody has
    to have checked it."""
    options = [*_listed(schema, "anyOf"), *_listed(schema, "oneOf"), schema]
    named = [option["type"] for option in options if isinstance(option, dict) and "type" in option]
    kinds = {kind for name in named for kind in (name if isinstance(name, list) else [name]) if isinstance(kind, str)}
    return kinds or {"string" for value in _listed(schema, "enum") if isinstance(value, str)}


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _typed(text: str) -> str:
    """A value that may be any: JSON or a literal of Python's if it is one, or else a string."""
    value = text.strip()
    if _is_json(value):
        return value
    literal = _python_literal(value) if value in _PYTHON_NAMES or value.startswith(("{", "[", "(")) else ""
    return literal if _is_json(literal) else quoted(text)


def _is_json(text: str) -> bool:
    try:
        json_text.decode(text, type=msgspec.Raw)
    except ValueError:
        return False
    return True


def _python_literal(text: str) -> str:
    """JSON of it; "" if it is none, whole."""
    cursor, pieces, found = Cursor(), list[str](), list[bool]()

    def read() -> Reading[None]:
        found.append((yield from python_value(cursor, pieces.append)))

    cursor.feed(text)
    cursor.ended = True
    next(read(), None)
    return "".join(pieces) if found == [True] and cursor.taken == len(text) else ""
