"""An answer's text as it arrives, for a program that reads it as if it were complete.

A program is a generator: at the end of the available text it yields, and it continues with more. Only the beginning of
a possible marker is read twice, so reading takes time linear in the text's length, whatever the pieces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from functools import cache
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], None]

_SPACE: Final = re.compile(r"\s+")
_PLAIN: Final = re.compile(r'[^"\\]+')
_ATOM: Final = re.compile(r"[\w+\-.]+")
_LAYOUT: Final = re.compile(r"[\s,:]+")


class Cursor:
    """The position in a text that still grows. If `record` is not None, it keeps the taken characters, which may turn
    out to be a call or text. `taken` counts the characters taken. `idle` is set while a program waits for more of a
    text whose characters, as far as the pattern matches, go to the sink unchanged."""

    def __init__(self) -> None:
        self.record: list[str] | None = None
        self.ended = False
        self.taken = 0
        self.idle: tuple[re.Pattern[str], Sink] | None = None
        self._text = ""
        self._at = 0

    @property
    def text(self) -> str:
        """The text that is at hand, from the character `origin` of the whole on."""
        return self._text

    @property
    def origin(self) -> int:
        return self.taken - self._at

    @property
    def before(self) -> str:
        """The character that was taken last; "" at the beginning of the text."""
        return self._text[self._at - 1 : self._at] if self.taken else ""

    def feed(self, text: str) -> None:
        """Append text, and drop the characters already taken but for the last one, which conditions may examine."""
        dropped = max(0, self._at - 1)
        self._text, self._at = self._text[dropped:] + text, self._at - dropped

    def take(self, count: int) -> str:
        """Consume and return the next `count` characters; fewer at the end of the text."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        self.taken += len(taken)
        if self.record is not None:
            self.record.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undo the latest `take`, which returned `text`."""
        self._at -= len(text)
        self.taken -= len(text)

    def restore(self, text: str) -> None:
        """Read `text` again, which has been taken last, in whatever pieces."""
        self._text, self._at = text + self._text[self._at :], 0
        self.taken -= len(text)

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters; fewer only at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def literal(self, word: str) -> Reading[bool]:
        """Return whether `word` comes next; it is then taken."""
        for length in range(1, len(word) + 1):
            if (yield from self.peek(length)) != word[:length]:
                return False
        self.take(len(word))
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """As many characters as `pattern`, which is one class of them repeated, takes."""
        while True:
            if self._at == len(self._text) and not self.ended:
                yield from self.wait_for_text(pattern, sink)
                continue
            match = pattern.match(self._text, self._at)
            if match is None:
                return
            sink(self.take(match.end() - self._at))

    def wait_for_text(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Wait for more text, which goes to the sink as far as `pattern` matches it."""
        self.idle = pattern, sink
        yield
        self.idle = None

    def spaces(self) -> Reading[None]:
        """Skip white space."""
        return self.run(_SPACE, drop)

    def until(self, markers: Markers, sink: Sink, limit: int | None = None) -> Reading[str]:
        """Take the first of `markers` and return it; the text before it goes to `sink`. Return "" at the end of the
        text, or after `limit` characters."""
        room = sys.maxsize if limit is None else limit
        while True:
            found = self._first(markers, room)
            end = found.start() if found is not None else self._safe_end(markers)
            before = min(end - self._at, room)
            if before:
                sink(self.take(before))
                room -= before
            if self._at < end:
                return ""
            if found is not None:
                return self.take(len(found[0]))
            if self.ended:
                return ""
            if self._at == len(self._text) and limit is None and self.record is None:
                yield from self.wait_for_text(markers.others, sink)
            else:
                yield

    def _first(self, markers: Markers, room: int) -> re.Match[str] | None:
        """Return the first marker within `room` characters, unless it may be the beginning of a longer one."""
        found = markers.pattern.search(self._text, self._at, min(sys.maxsize, self._at + room + markers.longest))
        if found is None or self.ended or len(self._text) - found.start() >= markers.longest:
            return found
        return None if self._text[found.start() :] in markers.beginnings else found

    def _safe_end(self, markers: Markers) -> int:
        """Return the position at which a possible marker begins."""
        if self.ended:
            return len(self._text)
        for at in range(max(self._at, len(self._text) - markers.longest + 1), len(self._text)):
            if self._text[at:] in markers.beginnings:
                return at
        return len(self._text)


class Markers:
    """Spellings to look for, the first in the text and of several there the first of these."""

    def __init__(self, *spellings: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self.longest = max(map(len, spellings), default=1)
        first = "".join(sorted({re.escape(word[0]) for word in spellings}))
        self.others = re.compile(rf"[^{first}]+" if first else r"(?s:.)+")  # text without the beginning of any
        self.beginnings = frozenset(word[:end] for word in spellings for end in range(1, len(word)))


markers_of: Final = cache(Markers)


def drop(text: str) -> None:
    """Discard text that belongs to no part: a `Sink`."""


def json_string(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """Copies a string of JSON, its quotes included; False where none begins or it does not end."""
    if not (yield from cursor.literal('"')):
        return False
    sink('"')
    while True:
        yield from cursor.run(_PLAIN, sink)
        if (yield from cursor.peek()) == '"':
            sink(cursor.take(1))
            return True
        if not (yield from cursor.peek(2)):
            return False
        sink(cursor.take(2))


def json_value(cursor: Cursor, sink: Sink) -> Reading[bool]:
    """Copy a JSON value, character for character, until its brackets are closed. Return False if it stops being one.
    The content between brackets and quotes is not parsed."""
    depth = 0
    while True:
        char = yield from cursor.peek()
        if char == '"':
            if not (yield from json_string(cursor, sink)):
                return False
        elif char in ("{", "["):
            depth += 1
            sink(cursor.take(1))
        elif char in ("}", "]") and depth:
            depth -= 1
            sink(cursor.take(1))
        elif depth and _LAYOUT.match(char):
            yield from cursor.run(_LAYOUT, sink)
        elif _ATOM.match(char):
            yield from cursor.run(_ATOM, sink)
        else:
            return False
        if not depth:
            return True
