"""An answer read by its declared regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.text.answers.answer import Answer
from forebay.text.answers.cursor import Cursor, Reading, Sink, drop
from forebay.text.answers.declared.calls import RegionCalls
from forebay.text.answers.declared.declaration import Declaration, Region
from forebay.text.answers.declared.patterns import Match, Pattern, Patterns, find
from forebay.text.answers.declared.trees import least_chars
from forebay.text.answers.parts import Said, TextKind, Thought

_MAX_AGAIN: Final = 4  # characters that are read again, for each one of the answer
_MAX_AGAIN_ANYWAY: Final = 4096


class Regions:
    """The program that reads the regions of a declaration. Without `calls` nothing is a call; without `thoughts` the
    thinking is text, with its tags."""

    def __init__(self, declaration: Declaration, answer: Answer, *, calls: bool, thoughts: bool) -> None:
        self._answer, self._cursor, self._thoughts = answer, answer.cursor, thoughts
        opened = [region for region in declaration.regions if region.opens is not None]
        self._opened: Sequence[Region] = [region for region in opened if calls or not region.calls]
        self._implicit = declaration.implicit
        called = declaration.calls if calls else None
        self._calls = RegionCalls(called, called.shape) if called is not None and called.shape is not None else None
        self._between = Patterns(*_opens(self._opened), *_layout(self._implicit))
        self._joined: set[str] = set()
        self._again = 0

    def read(self, begun: Region | None) -> Reading[None]:
        """Read an answer that begins within the region `begun`; None for the implicit one."""
        answer, sink = self._answer, self._sink(self._implicit)
        if begun is not None and begun is not self._implicit:
            yield from self._region(begun, None)
        while (found := (yield from find(self._cursor, self._between, sink))) is not None:
            if found.number == len(self._opened):  # the implicit region was closed
                answer.turn()
            else:
                yield from self._region(self._opened[found.number], found)

    def _sink(self, region: Region | None) -> Sink:
        if region is None:
            return drop
        if region.thinks:
            return self._answer.think if self._thoughts else self._answer.say
        return self._answer.say if region.says else drop

    def _region(self, region: Region, opened: Match | None) -> Reading[None]:
        if region.calls and opened is not None and self._calls is not None:
            yield from self._called(self._calls, opened, known=False)
            self._answer.give_up()
        else:
            yield from self._text(region, opened)

    def _text(self, region: Region, opened: Match | None) -> Reading[None]:
        """Read a region of text up to its end; thinking also ends behind a call of a tool that exists."""
        answer = self._answer
        shows_tags = region.thinks and not self._thoughts
        answer.thinking = region.thinks and self._thoughts
        kind: TextKind = Thought if answer.thinking else Said
        if not shows_tags:
            answer.turn(kind)
        elif opened is not None:
            answer.say(opened.text)
        if region.join and region.name in self._joined and not region.dropped:
            answer.join(kind, region.join)
        self._joined.add(region.name)
        found = yield from self._up_to_end(region, kind)
        if answer.cursor.record is not None:  # a call ended it
            answer.give_up()
        elif not shows_tags:
            answer.turn()
        elif found is not None:
            answer.say(found.text)
        answer.thinking = False

    def _up_to_end(self, region: Region, kind: TextKind) -> Reading[Match | None]:
        """Return the match that ends the region; None if the text or a call did."""
        calls = self._calls if region.thinks else None
        ends = Patterns(*_closes(region), *(_opens([calls.region]) if calls is not None else ()))
        num_closes = len(_closes(region))
        while (found := (yield from find(self._cursor, ends, self._sink(region)))) is not None:
            if found.number < num_closes or calls is None:
                return found
            if (yield from self._called(calls, found, known=True)):
                return None
            self._answer.give_up(kind)
        return None

    def _called(self, calls: RegionCalls, opened: Match, *, known: bool) -> Reading[bool]:
        """Read calls; return whether there was one. What follows the opening without a call is read again, unless too
        much was."""
        cursor, before = self._cursor, self._answer.calls
        cursor.record = [opened.text]
        yield from calls.read(self._answer, opened, known=known)
        if self._answer.calls > before:
            return True
        recorded = "".join(cursor.record or [])
        self._again += len(recorded)
        if self._again <= _MAX_AGAIN_ANYWAY + _MAX_AGAIN * cursor.taken:
            cursor.restore(recorded)
            cursor.record = []
            cursor.take(len(opened.text))
        return False


def region_begun(declaration: Declaration, prompt: str) -> Region | None:
    """Return the region within which an answer to this prompt begins; None for the implicit one."""
    cursor, anchor = Cursor(), Patterns(declaration.anchor)
    begin = 0

    def past_anchors() -> Reading[None]:
        nonlocal begin
        while (yield from find(cursor, anchor, drop)) is not None:
            begin = cursor.taken

    cursor.feed(prompt)
    cursor.ended = True
    next(past_anchors(), None)
    opened = [region for region in declaration.regions if region.opens is not None]
    between = Patterns(*_opens(opened), *_layout(declaration.implicit))
    current: Region | None = None

    def regions() -> Reading[None]:
        nonlocal current
        while True:
            found = yield from find(cursor, Patterns(*_closes(current)) if current else between, drop)
            if found is None:
                return
            current = None if current is not None or found.number == len(opened) else opened[found.number]

    cursor = Cursor()
    cursor.feed(prompt[begin:])
    next(regions(), None)
    return current


def _opens(regions: Sequence[Region]) -> list[Pattern]:
    return [region.opens for region in regions if region.opens is not None]


def _closes(region: Region) -> list[Pattern]:
    return [region.closes] if region.closes is not None else []


def _layout(implicit: Region | None) -> list[Pattern]:
    """Return the pattern of what is no text between regions; one that may be empty ends nothing."""
    return [each for each in (_closes(implicit) if implicit is not None else []) if least_chars(each.tree)]
