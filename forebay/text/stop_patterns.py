"""Regular expressions at which an output ends, read character by character, each once: the time is linear in the text's
length for every pattern.

Patterns are Python's, without anchors, back-references and look-around. The machine is K. Thompson's, Regular
expression search algorithm, 1968.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

MAX_PLACES: Final = 256  # of one pattern, in its machine: each costs a look at each character
MAX_MATCH_CHARS: Final = 1024  # longer matches are not looked for: that much text is held back at most
_ATOM: Final = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^a-zA-Z0-9]|\\[dwsDWSnrtfva]"
    r"|[^\\^$*+?{()|\[]",
    re.DOTALL,
)
_REPEAT: Final = re.compile(r"([*+?])\??|\{(\d{1,3})(,(\d{1,3})?)?\}\??")


class BadPattern(ValueError):
    """Says where."""


class _Repeat(NamedTuple):
    node: _Node
    least: int
    most: int | None


class _All(NamedTuple):
    nodes: list[_Node]


class _Any(NamedTuple):
    nodes: list[_Node]


_Node: TypeAlias = "re.Pattern[str] | _Repeat | _All | _Any"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> _Node:
        found = self._any()
        if self._at < len(self._text):
            raise self._bad("a bracket is closed that is not open")
        return found

    def _any(self) -> _Node:
        options = [self._all()]
        while self._take("|"):
            options.append(self._all())
        return _Any(options)

    def _all(self) -> _Node:
        nodes: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            nodes.append(self._repeated(self._one()))
        return _All(nodes)

    def _one(self) -> _Node:
        if self._take("(?:") or self._take("("):
            if self._take("?"):
                raise self._bad("of groups only (...) and (?:...) are known")
            found = self._any()
            if not self._take(")"):
                raise self._bad("a bracket is not closed")
            return found
        match = _ATOM.match(self._text, self._at)
        if match is None:
            raise self._bad("a character, class or group is missing here; anchors and references are not supported")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # of classes that will mean something else
                found = re.compile(match[0])
        except (re.error, FutureWarning) as error:
            raise self._bad(str(error)) from error
        self._at = match.end()
        return found

    def _repeated(self, node: _Node) -> _Node:
        while match := _REPEAT.match(self._text, self._at):
            self._at = match.end()
            if match[1]:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[match[1]]
            else:
                least = int(match[2])
                most = least if match[3] is None else None if match[4] is None else int(match[4])
            if most is not None and most < least:
                raise self._bad("a count ends before it begins")
            node = _Repeat(node, least, most)
        return node

    def _take(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) * found
        return found

    def _bad(self, what: str) -> BadPattern:
        return BadPattern(f"{what} (at character {self._at})")


_Test: TypeAlias = Callable[[str], object]


@dataclass(slots=True)
class Machine:
    """Places that test a character each, and those that come behind it; `END` is a match. `first` are the places at the
    beginning."""

    tests: list[_Test] = field(default_factory=list)
    following: list[tuple[int, ...]] = field(default_factory=list)
    first: tuple[int, ...] = ()


END: Final = -1


class _Builder:
    """Makes places from the end to the beginning. A place without a test leads on at once."""

    def __init__(self) -> None:
        self.tests: list[_Test | None] = []
        self.outs: list[tuple[int, ...]] = []

    def place(self, test: _Test | None, *outs: int) -> int:
        if len(self.tests) >= MAX_PLACES:
            raise BadPattern(f"it takes more than {MAX_PLACES} places: repeat less")
        self.tests.append(test)
        self.outs.append(outs)
        return len(self.tests) - 1

    def build(self, node: _Node, then: int) -> int:
        match node:
            case _All(nodes):
                for part in reversed(nodes):
                    then = self.build(part, then)
                return then
            case _Any(nodes):
                return self.place(None, *(self.build(part, then) for part in nodes))
            case _Repeat(part, least, most):
                return self._repeat(part, least, most, then)
            case _:
                return self.place(node.match, then)

    def _repeat(self, part: _Node, least: int, most: int | None, then: int) -> int:
        behind = then
        if most is None:
            behind = self.place(None)
            self.outs[behind] = (self.build(part, behind), then)
        for _ in range((most or least) - least):
            behind = self.place(None, self.build(part, behind), then)
        for _ in range(least):
            behind = self.build(part, behind)
        return behind

    def reached(self, place: int) -> tuple[int, ...]:
        """The places with a test, and the end, that it leads to at once."""
        found: dict[int, None] = {}
        left = [place]
        while left:
            at = left.pop()
            if at not in found:
                found[at] = None
                left += () if at == END or self.tests[at] is not None else self.outs[at]
        return tuple(at for at in found if at == END or self.tests[at] is not None)


@lru_cache(maxsize=256)
def machine_of(pattern: str) -> Machine:
    """Compile a pattern. Raises BadPattern if it is malformed, or if it matches the empty string."""
    builder = _Builder()
    start = builder.build(_Parser(pattern).whole(), END)
    first = builder.reached(start)
    if END in first:
        raise BadPattern("the pattern matches the empty string: require at least one character")
    pairs = zip(builder.tests, builder.outs, strict=True)
    following = [builder.reached(outs[0]) if test else () for test, outs in pairs]
    return Machine([test or bool for test in builder.tests], following, first)


class PatternSearch:
    """Searches a growing text for a pattern. In each place the match that began first is kept: of matches that end
    together the longest counts."""

    __slots__ = ("_live", "_machine", "position")

    def __init__(self, pattern: str) -> None:
        self._machine = machine_of(pattern)
        self._live: dict[int, int] = {}  # where whoever is in a place began
        self.position = 0

    def push(self, text: str) -> tuple[int, int] | None:
        """Where the first match begins and ends that is complete, in characters of the whole text."""
        machine = self._machine
        for char in text:
            live: dict[int, int] = {}
            ended = None
            for place, begin in (*self._live.items(), *((place, self.position) for place in machine.first)):
                if machine.tests[place](char):
                    for following in machine.following[place]:
                        if following == END:
                            ended = begin if ended is None else min(ended, begin)
                        elif live.get(following, begin) >= begin:
                            live[following] = begin
            self.position += 1
            if ended is not None:
                return ended, self.position
            self._live = {place: begin for place, begin in live.items() if self.position - begin < MAX_MATCH_CHARS}
        return None

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a match."""
        return self.position - min(self._live.values(), default=self.position)
