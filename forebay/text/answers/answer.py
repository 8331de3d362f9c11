"""The parts of one answer, put together while it is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from forebay.text.answers.cursor import Cursor
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Kind, Part, Said, TextKind, Thought

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: the JSON schema of each one's parameters, by its name."""


@dataclass(slots=True)
class Answer:
    """The parts of an answer that are read so far. White space around the thinking, between calls, and alone before or
    behind calls is layout and belongs to no part, unless `exact`. Around a call it belongs to the text beside it.

    `marks` has the character at which each kind begins. The kinds of characters behind the first `settled` are open.
    """

    cursor: Cursor
    tools: Tools
    exact: bool
    marks: list[tuple[int, Kind]]
    settled: int = 0
    calls: int = 0
    thinking: bool = False  # the next text belongs to the thinking
    parts: list[Part] = field(default_factory=list)
    _blank: list[str] = field(default_factory=list)  # white space that is layout unless text follows
    _waits: bool = True  # for text, since the beginning, the thinking or a call
    _drops: bool = False  # white space before that text is layout

    def say(self, text: str) -> None:
        """Append visible text."""
        self._append_text(Said, text)

    def think(self, text: str) -> None:
        """Append reasoning text."""
        self._append_text(Thought, text)

    def _append_text(self, kind: TextKind, text: str) -> None:
        if self.exact:
            if text:
                self._add(kind, text, 0)
            return
        begin = len(text) - len(text.lstrip())
        if begin == len(text) and (self._waits or kind is Thought or not text):
            if text and not self._drops:
                self._blank.append(text)
            return
        end = len(text) if kind is Said else len(text.rstrip())
        before = "" if self._drops else "".join(self._blank) + text[:begin]
        self._add(kind, before + text[begin:end], len(text) - end)
        self._blank = [text[end:]] if end < len(text) else []
        self._waits = self._drops = False

    def _add(self, kind: TextKind, text: str, num_behind: int) -> None:
        """Append a part of the characters taken last, except the last `num_behind` of them."""
        self.parts.append(kind(text))
        self.settled = self.cursor.taken - num_behind
        self._mark(kind, self.settled - len(text))

    def _mark(self, kind: Kind, begin: int) -> None:
        if kind is not self.marks[-1][1]:
            self.marks.append((begin, kind))

    def kind(self, begin: int, end: int) -> Kind:
        """Return the kind of the characters [begin, end): visible text if any of them is, else that at `begin`."""
        at = bisect_right(self.marks, begin, key=itemgetter(0)) - 1
        return Said if any(kind is Said for first, kind in self.marks[at:] if first < end) else self.marks[at][1]

    def pass_by(self, kind: Kind, text: str) -> Part | None:
        """Return `text`, which is not on the cursor, as a part, and count it as read. None if white space is pending or
        the kind changes."""
        if kind is not self.marks[-1][1]:
            return None
        held = self._blank or self._waits or (kind is Thought and text[-1].isspace())
        if held and kind is not CallArguments and not self.exact:
            return None
        self.cursor.taken += len(text)
        self.settled = self.cursor.taken
        if kind is CallArguments:
            return CallArguments(self.calls, text)
        return Said(text) if kind is Said else Thought(text)

    def turn(self, kind: Kind | None = None) -> None:
        """Begin a part of `kind`, to which the white space since the last part belongs."""
        if kind is not None:
            self._mark(kind, self.settled)
        self._blank.clear()
        self._waits = self._drops = True
        self.settled = self.cursor.taken

    def join(self, kind: TextKind, text: str) -> None:
        """Append a text of ours, which the model did not write, between two parts of a kind."""
        self.parts.append(kind(text))

    def begin(self, name: str) -> None:
        """Begin a tool call with this name."""
        self.turn(CallArguments)
        self._drops = False
        self.cursor.record = None
        self.parts.append(CallBegun(self.calls, name))

    def argue(self, text: str) -> None:
        """Append JSON text to the arguments of the current call."""
        if text:
            self.parts.append(CallArguments(self.calls, text))
            self.settled = self.cursor.taken

    def end(self) -> None:
        """End the current call."""
        self.parts.append(CallEnded(self.calls))
        self.calls += 1
        self.layout()

    def layout(self) -> None:
        """Count the characters taken since the last call as part of calls, not as text."""
        self.cursor.record = []
        self.settled = self.cursor.taken

    def give_up(self, kind: TextKind = Said) -> None:
        """Count the recorded characters as text of `kind`: they were no call, or follow one."""
        recorded, self.cursor.record = self.cursor.record or [], None
        self._append_text(kind, "".join(recorded))

    def finish(self) -> None:
        """End the answer; held-back white space becomes text if nothing else came."""
        if self._blank and not self.calls:
            self._add(Said, "".join(self._blank), 0)
        self._blank.clear()
        self.settled = self.cursor.taken

    def taken(self) -> list[Part]:
        """The parts since the last time, neighbours of a kind joined."""
        parts, self.parts = self.parts, []
        if len(parts) < 2:
            return parts
        joined: list[Part] = []
        run: list[str] = []
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if not isinstance(part, Said | Thought | CallArguments):
                joined.append(part)
                continue
            run.append(part.text)
            if type(following) is not type(part):
                joined.append(part._replace(text="".join(run)))
                run.clear()
        return joined
