"""Calls with keys and values between tags, and the JSON made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.text.answers.answer import Answer
from forebay.text.answers.argument_types import ArgumentType, argument_type
from forebay.text.answers.calls import MAX_HEAD_CHARS, TOOL_NAME, is_json
from forebay.text.answers.cursor import Cursor, Reading, Sink, markers_of
from forebay.text.answers.python_values import python_value, quoted

_PYTHON_NAMES: Final = ("True", "False", "None")


@dataclass(frozen=True, slots=True)
class Tagged:
    """The name between `opens` and `opened`; keys and values between tags of their own, to the tag `closes`. Behind
    `text_end` instead of `key_end`, the value is a text whatever its tool takes."""

    opens: str
    opened: tuple[str, ...]  # one of them; what comes next may stand in it
    key: str
    key_end: str
    value: str
    value_end: str
    closes: str
    lines: bool = False  # a value stands on lines of its own
    text_end: str = ""

    def __call__(self, answer: Answer, known: bool) -> Reading[None]:
        cursor = answer.cursor
        yield from cursor.spaces()
        if not (yield from cursor.literal(self.opens)):
            return
        head: list[str] = []
        marker = yield from cursor.until(markers_of(*self.opened), head.append, MAX_HEAD_CHARS)
        name = "".join(head).strip()
        if not marker or not TOOL_NAME.fullmatch(name) or (known and name not in answer.tools):
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
            ends = filter(None, (self.key_end, self.text_end))
            end = yield from cursor.until(markers_of(*ends), key.append, MAX_HEAD_CHARS)
            if not end:
                return False
            if self.value:
                yield from cursor.spaces()
                if not (yield from cursor.literal(self.value)):
                    return False
            argument = "".join(key).strip()
            answer.argue(("" if first else ", ") + quoted(argument) + ": ")
            first = False
            kind = argument_type(answer.tools.get(name, {}), argument)
            ended = yield from self._value(answer, ArgumentType(text=True) if end == self.text_end else kind)
            if ended in ("", self.closes):
                return bool(ended)
            in_key = ended == self.key

    @property
    def ends_inside(self) -> tuple[str, ...]:
        """Marks that end a value whose own end is missing: the next key, or the end of the call."""
        return tuple(f"\n{tag}" if self.lines else tag for tag in (self.key, self.closes))

    def _value(self, answer: Answer, kind: ArgumentType) -> Reading[str]:
        """The tag that ended it; "" if none did."""
        cursor = answer.cursor
        if self.lines:
            yield from cursor.literal("\n")
        ends = (f"\n{self.value_end}", self.value_end) if self.lines else (self.value_end,)
        value = TextValue(answer.argue, kind.nullable) if kind.text else _AnyValue(answer.argue)
        ended = yield from cursor.until(markers_of(*ends, *self.ends_inside), value.write)
        value.end(bool(ended))
        return ended.lstrip("\n")


class TextValue:
    """A JSON string of a text, written as the text comes. If the value is nullable, `null` alone is null."""

    def __init__(self, sink: Sink, nullable: bool) -> None:
        self._sink = sink
        self._pending: str | None = "" if nullable else None  # as long as it may become `null`
        if not nullable:
            sink('"')

    def write(self, text: str) -> None:
        """Append to the text."""
        if self._pending is not None:
            text = self._pending + text
            self._pending = text if "null".startswith(text) else None
            if self._pending is not None:
                return
            self._sink('"')
        self._sink(quoted(text)[1:-1])

    def end(self, closed: bool) -> None:
        """End the string, if the model ended the text."""
        if self._pending is not None:
            self._sink(
                "null" if closed and self._pending == "null" else quoted(self._pending)[: None if closed else -1]
            )
        elif closed:
            self._sink('"')


class _AnyValue:
    """JSON of a value of any type, written at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: list[str] = []

    def write(self, text: str) -> None:
        self._pending.append(text)

    def end(self, closed: bool) -> None:
        self._sink(_typed("".join(self._pending)))


def _typed(text: str) -> str:
    """A value that may be any: JSON or a literal of Python's if it is one, or else a string."""
    value = text.strip()
    if is_json(value):
        return value
    literal = _python_literal(value) if value in _PYTHON_NAMES or value.startswith(("{", "[", "(")) else ""
    return literal if is_json(literal) else quoted(text)


def _python_literal(text: str) -> str:
    """JSON of it; "" if it is none, whole."""
    cursor, pieces, found = Cursor(), list[str](), list[bool]()

    def read() -> Reading[None]:
        found.append((yield from python_value(cursor, pieces.append)))

    cursor.feed(text)
    cursor.ended = True
    next(read(), None)
    return "".join(pieces) if found == [True] and cursor.taken == len(text) else ""
