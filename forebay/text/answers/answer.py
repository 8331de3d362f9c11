"""The parts of one answer, put together while it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought
from forebay.text.answers.tape import Tape

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: the JSON schema of each one's parameters, by its name."""


@dataclass(slots=True)
class Answer:
    """White space between text and what is none (markers, calls, thinking) is layout, and no part, unless `exact`."""

    tape: Tape
    tools: Tools
    exact: bool
    calls: int = 0
    parts: list[Part] = field(default_factory=list)
    _blank: list[str] = field(default_factory=list)  # white space that is layout unless text follows
    _fresh: bool = False  # only layout since what is no text

    def say(self, text: str) -> None:
        self._tell(Said, text)

    def think(self, text: str) -> None:
        self._tell(Thought, text)

    def _tell(self, kind: Callable[[str], Said | Thought], text: str) -> None:
        if self.exact:
            self.parts += [kind(text)] if text else []
            return
        begin = len(text) - len(text.lstrip())
        if begin == len(text):
            if text and not self._fresh:
                self._blank.append(text)
            return
        end = len(text.rstrip())
        before = "" if self._fresh else "".join(self._blank) + text[:begin]
        self.parts.append(kind(before + text[begin:end]))
        self._blank = [text[end:]] if end < len(text) else []
        self._fresh = False

    def turn(self) -> None:
        """What follows is not the text that was before."""
        self._blank.clear()
        self._fresh = True

    def begin(self, name: str) -> None:
        self.turn()
        self.tape.record = None
        self.parts.append(CallBegun(self.calls, name))

    def argue(self, text: str) -> None:
        if text:
            self.parts.append(CallArguments(self.calls, text))

    def end(self) -> None:
        self.parts.append(CallEnded(self.calls))
        self.calls += 1
        self.tape.record = []

    def layout(self) -> None:
        """What has been taken since the last call belongs to calls, and is no text."""
        self.tape.record = []

    def give_up(self) -> None:
        """Say what has been recorded: it was no call, or stands behind one."""
        recorded, self.tape.record = self.tape.record or [], None
        self.say("".join(recorded))

    def finish(self) -> None:
        if not self._fresh and self._blank:
            self.parts.append(Said("".join(self._blank)))
        self._blank.clear()

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
