"""How models spell calls of tools: one way of reading each, which formats name the markers of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from forebay.base import json_text
from forebay.text.answers.answer import Answer
from forebay.text.answers.cursor import Cursor, Reading, drop, json_string, json_value, markers_of
from forebay.text.answers.python_values import python_value, quoted

MAX_HEAD_CHARS: Final = 512  # what stands before a call's arguments
_NAME_CHARS: Final = re.compile(r"[\w.\-/]+")
TOOL_NAME: Final = re.compile(r"[\w.\-/]{1,128}")
_ARGUMENTS: Final = ("arguments", "parameters")
_BESIDE_NAME: Final = ("name", "type", "id", "call_id", "tool_call_id", "index")  # members that are no arguments

Body: TypeAlias = Callable[[Answer, bool], Reading[None]]
"""Reads calls behind their first marker; with the flag, only those of tools that there are: it is text otherwise. What
does not become a call stays recorded."""


@dataclass(frozen=True, slots=True)
class Objects:
    """`{"name": ..., "arguments": {...}}`, one or a list of them; members in any order, by these names."""

    name: str = "name"
    arguments: tuple[str, ...] = _ARGUMENTS
    name_first: bool = False  # an object with another first member is not part of a call

    def __call__(self, answer: Answer, known: bool) -> Reading[None]:
        yield from answer.cursor.spaces()
        in_list = not self.name_first and (yield from answer.cursor.literal("["))
        yield from self.some(answer, known, in_list=in_list)

    def some(self, answer: Answer, known: bool, *, in_list: bool) -> Reading[None]:
        """Read objects one behind the other."""
        cursor = answer.cursor
        while True:
            yield from cursor.spaces()
            before = answer.calls
            yield from self._object(answer, known)
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

    def _object(self, answer: Answer, known: bool) -> Reading[None]:
        """An object is a call if it has arguments, or behind a marker a name alone. With `known`, one with a member of
        its own before the arguments is a record, or the definition of a tool."""
        cursor = answer.cursor
        if not (yield from cursor.literal("{")):
            return
        call = _Call(self, answer, known, may_be_name_alone=not known)
        while (member := (yield from _member(answer))) is not None and (yield from call.read(member)):
            yield from cursor.spaces()
            if not (yield from cursor.literal(",")):
                yield from call.close()
                return
        if call.begun:
            answer.end()


def by_name(answer: Answer, known: bool) -> Reading[None]:
    """Read a list of objects with one member each: the name of a tool, whose value has the arguments."""
    cursor = answer.cursor
    yield from cursor.spaces()
    more = yield from cursor.literal("[")
    while more:
        yield from cursor.spaces()
        if not (yield from cursor.literal("{")):
            return
        name = yield from _member(answer)
        if name is None or not TOOL_NAME.fullmatch(name) or (known and name not in answer.tools):
            return
        if (yield from cursor.peek()) != "{":
            return
        answer.begin(name)
        yield from json_value(cursor, answer.argue)
        yield from cursor.spaces()
        yield from cursor.literal("}")
        answer.end()
        yield from cursor.spaces()
        more = yield from cursor.literal(",")
        if not more:
            yield from cursor.literal("]")
        answer.layout()


def rest_of_list(answer: Answer, known: bool) -> Reading[None]:
    """Read objects behind the bracket of their list."""
    return objects.some(answer, known, in_list=True)


def listed_in_text(answer: Answer, known: bool) -> Reading[None]:
    """Read a list of objects, or a block of code with one or with an object."""
    fenced = yield from answer.cursor.literal("```json")
    yield from answer.cursor.spaces()
    in_list = yield from answer.cursor.literal("[")
    if fenced or in_list:
        yield from named_objects.some(answer, known, in_list=in_list)


@dataclass(slots=True)
class _Call:
    """An object that may be a call, while its members are read. `held` has arguments that come before the name or are
    not an object: they are part of the answer once the object is closed."""

    form: Objects
    answer: Answer
    known: bool
    may_be_name_alone: bool  # no member so far is another than those that a call without arguments may have
    name: str = ""
    begun: bool = False  # the call is part of the answer
    held: list[str] = field(default_factory=list)

    def read(self, member: str) -> Reading[bool]:
        """Read the value of a member; return whether the object may still be a call."""
        if self.form.name_first and not self.name and member != self.form.name:
            return False
        if member == self.form.name and not self.name:
            return (yield from self._read_name())
        if member in self.form.arguments and not self.begun and not self.held:
            return (yield from self._read_arguments())
        return (yield from self._read_other(member))

    def _read_name(self) -> Reading[bool]:
        self.name = yield from _word(self.answer)
        return bool(self.name) and not (self.known and self.name not in self.answer.tools)

    def _read_other(self, member: str) -> Reading[bool]:
        self.may_be_name_alone = self.may_be_name_alone and member in _BESIDE_NAME
        if self.known and not self.begun and member not in _BESIDE_NAME:
            return False
        return (yield from json_value(self.answer.cursor, drop))

    def _read_arguments(self) -> Reading[bool]:
        cursor = self.answer.cursor
        self.begun = bool(self.name) and (yield from cursor.peek()) == "{"
        if not self.begun:
            return (yield from _held_arguments(cursor, self.held, self.known))
        self.answer.begin(self.name)
        return (yield from json_value(cursor, self.answer.argue))

    def close(self) -> Reading[None]:
        """Read the end of the object. With a name, and arguments or none, it is a call."""
        closed = yield from self.answer.cursor.literal("}")
        is_whole = bool(self.name) and (self.may_be_name_alone or bool(self.held))
        if not self.begun and closed and is_whole:
            self.answer.begin(self.name)
            self.answer.argue("".join(self.held) or "{}")
            self.begun = True
        if self.begun:
            self.answer.end()


objects: Final = Objects()
named_objects: Final = Objects(name_first=True)  # of calls in text


def _held_arguments(cursor: Cursor, held: list[str], known: bool) -> Reading[bool]:
    """Hold arguments that come before the name or are not an object. null counts as {}, and an object in a JSON string
    as the object. With `known`, other values are not accepted as arguments."""
    value: list[str] = []
    if not (yield from json_value(cursor, value.append)):
        return False
    text = "".join(value)
    if text == "null":
        text = "{}"
    elif text.startswith('"') and is_json(text):
        inner = json_text.decode(text, type=str)
        text = inner if inner.lstrip().startswith("{") and is_json(inner) else text
    held.append(text)
    return not known or text.lstrip().startswith("{")


def _member(answer: Answer) -> Reading[str | None]:
    """Take the next member's name and its colon, and return the name; None if there is no member."""
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
    """Take a JSON string, and return it if it may be a tool's name; otherwise ""."""
    word: list[str] = []
    if not (yield from json_string(answer.cursor, word.append)):
        return ""
    name = "".join(word)[1:-1]
    return name if TOOL_NAME.fullmatch(name) else ""


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


def name_and_object(answer: Answer, known: bool) -> Reading[None]:
    """Read the name of a tool that there is, alone on a line, and an object below it."""
    cursor, name = answer.cursor, list[str]()
    yield from cursor.run(_NAME_CHARS, name.append)
    called = "".join(name)
    if called not in answer.tools or not (yield from cursor.literal("\n")):
        return
    yield from cursor.spaces()
    if (yield from cursor.peek()) != "{":
        return
    answer.begin(called)
    yield from json_value(cursor, answer.argue)
    answer.end()


def named_line(answer: Answer, known: bool) -> Reading[None]:
    """Read `name_and_object` in text: the name begins a line, or follows a tag."""
    if answer.cursor.before in ("", "\n", ">"):
        yield from name_and_object(answer, known)


def no_calls(answer: Answer, known: bool) -> Reading[None]:
    """Read nothing."""
    yield from ()


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


def _python_calls(answer: Answer, known: bool, *, listed: bool = True) -> Reading[None]:
    cursor = answer.cursor
    while True:
        yield from cursor.spaces()
        name: list[str] = []
        yield from cursor.run(_NAME_CHARS, name.append)
        called = "".join(name)
        if not TOOL_NAME.fullmatch(called) or (known and called not in answer.tools):
            return
        if not (yield from cursor.literal("(")):
            return
        answer.begin(called)
        yield from _keywords(answer)
        answer.end()
        if not listed:
            continue
        yield from cursor.spaces()
        if (yield from cursor.peek()) not in (",", "]"):
            return
        closes = cursor.take(1) == "]"
        answer.layout()
        if closes:
            return


def python_lines(answer: Answer, known: bool) -> Reading[None]:
    """Read calls written as Python, one after the other without a list around them."""
    return _python_calls(answer, known, listed=False)


def python_or_objects(answer: Answer, known: bool) -> Reading[None]:
    """Read calls written as Python (`[f(x=1)]`) or as JSON objects, with or without a list around them."""
    cursor = answer.cursor
    yield from cursor.spaces()
    in_list = yield from cursor.literal("[")
    yield from cursor.spaces()
    if (yield from cursor.peek()) == "{":
        yield from objects.some(answer, known, in_list=in_list)
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


def is_json(text: str) -> bool:
    """Return whether the text is one JSON value."""
    try:
        json_text.decode(text, type=msgspec.Raw)
    except ValueError:
        return False
    return True
