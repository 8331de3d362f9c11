"""Patterns that are found in linear time, whatever they are: those that checkpoints declare are not trusted.

A tree is compiled into instructions, which all attempts at a match execute together, a character at a time (Pike's
algorithm: https://swtch.com/~rsc/regexp/regexp2.html). Of several matches the one that begins first counts, and of
these the one that Python's `re` prefers. A match has at most `MAX_CHARS` characters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from forebay.text.answers.cursor import Cursor, Reading, Sink
from forebay.text.answers.declared.trees import (
    Ahead,
    Assertion,
    Char,
    Choice,
    Group,
    Node,
    PatternError,
    Repeat,
    ahead_chars,
    parts_of,
)

MAX_CHARS: Final = 512
_MAX_CODE: Final = 512  # instructions of a pattern; counted repetitions multiply them

Saves: TypeAlias = tuple[tuple[int, int], ...]
"""Marks of groups and their places in the text, the latest last: 2n begins the group n, 2n + 1 ends it."""


class Take(NamedTuple):
    """Continue behind a character of the class."""

    chars: Callable[[str], re.Match[str] | None]
    source: str


class Split(NamedTuple):
    """Continue at both places, `first` preferred."""

    first: int
    second: int


class Save(NamedTuple):
    """Note the place."""

    mark: int


class Check(NamedTuple):
    """Continue if the condition holds: of an assertion, or else of what is ahead."""

    condition: str
    ahead: Pattern | None = None
    wanted: bool = True


class Matched(NamedTuple):
    """The end of a match."""


Step: TypeAlias = Take | Split | Save | Check | Matched


class _Compiler:
    def __init__(self) -> None:
        self.code: list[Step] = []
        self.names: list[str] = []

    def add(self, step: Step) -> int:
        if len(self.code) >= _MAX_CODE:
            raise PatternError(f"a pattern of more than {_MAX_CODE} instructions")
        self.code.append(step)
        return len(self.code) - 1

    def write(self, node: Node) -> None:
        match node:
            case Char(source, _):
                self.add(Take(re.compile(source, re.DOTALL).fullmatch, source))
            case Choice(options):
                self._choose(options)
            case Repeat():
                self._repeat(node)
            case Group(part, name):
                self.names.append(name)
                mark = 2 * len(self.names) - 2
                self.add(Save(mark))
                self.write(part)
                self.add(Save(mark + 1))
            case Assertion():
                self.add(Check(node.kind))
            case Ahead(part, wanted):
                self.add(Check("", Pattern(part), wanted))
            case _:
                for part in parts_of(node):
                    self.write(part)

    def _choose(self, options: Sequence[Node]) -> None:
        jumps = []
        for option in options[:-1]:
            split = self.add(Split(0, 0))
            self.write(option)
            jumps.append(self.add(Split(0, 0)))
            self.code[split] = Split(split + 1, len(self.code))
        self.write(options[-1])
        for jump in jumps:
            self.code[jump] = Split(len(self.code), len(self.code))

    def _repeat(self, node: Repeat) -> None:
        for _ in range(node.least):
            self.write(node.part)
        splits = []
        for _ in range(1 if node.most is None else node.most - node.least):
            splits.append(self.add(Split(0, 0)))
            self.write(node.part)
        if node.most is None:
            self.add(Split(splits[0], splits[0]))
        for split in splits:
            ways = (split + 1, len(self.code))
            self.code[split] = Split(*(ways[::-1] if node.lazy else ways))


class Pattern:
    """A compiled pattern. `ahead`: how many characters behind a place must be known to decide on conditions there."""

    def __init__(self, tree: Node) -> None:
        compiler = _Compiler()
        compiler.write(tree)
        compiler.add(Matched())
        self.tree, self.code, self.names = tree, compiler.code, compiler.names
        self.ahead = ahead_chars(tree)

    @cached_property
    def first(self) -> str:
        """A pattern of `re` of the characters that a match may begin with; "" for any."""
        found: dict[str, None] = {}
        seen: set[int] = set()
        waiting = [0]
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            match self.code[place]:
                case Matched() | Check():
                    return ""
                case Take(_, source):
                    found[source] = None
                case Split(first, second):
                    waiting += [first, second]
                case _:
                    waiting.append(place + 1)
        return "|".join(found)

    def fits(self, text: str, at: int, ended: bool) -> bool:
        """Return whether a match begins at `at` in the text, which goes on behind its end unless `ended`."""
        search = _Search(self, anchored=True)
        for place in range(at, len(text) + 1):
            search.close(text, place, 0, ended)
            if search.found is not None or not search.threads:
                break
            if place < len(text):
                search.consume(text[place], place)
        return search.found is not None

    def whole(self, text: str) -> bool:
        """Return whether the whole text matches."""
        search = _Search(self, anchored=True)
        search.close(text, 0, 0, True)
        for place, char in enumerate(text):
            search.found = None
            search.consume(char, place)
            search.close(text, place + 1, 0, True)
        return search.found is not None and search.found[1] == len(text)


class Found(NamedTuple):
    """The match of the pattern `number` in the absolute place [begin, end) of the text."""

    number: int
    begin: int
    end: int
    saves: Saves


_Thread: TypeAlias = tuple[int, int, Saves]  # an instruction, the place at which the attempt began, what it noted


class _Search:
    """All attempts at one pattern. `threads` wait for the next character, the preferred one first; `found` is the match
    that counts unless one of them matches."""

    def __init__(self, pattern: Pattern, *, anchored: bool = False) -> None:
        self.threads: list[_Thread] = []
        self.found: tuple[int, int, Saves] | None = None
        self.pattern = pattern
        self._anchored, self._begun = anchored, False

    @property
    def idle(self) -> bool:
        """Return whether no attempt is under way."""
        return not self.threads and self.found is None

    @property
    def begin(self) -> int:
        """Return the first place at which a match may begin; one beyond every text if there is no attempt."""
        places = [self.threads[0][1]] if self.threads else []
        return min([*places, *([self.found[0]] if self.found else [])], default=sys.maxsize)

    def close(self, text: str, at: int, origin: int, ended: bool) -> None:
        """Follow the instructions that take no character at the place `at` of the text, which is `origin + at` of the
        whole. A new attempt begins there, unless there is a match."""
        waiting, self.threads = self.threads, []
        if self.found is None and not (self._anchored and self._begun):
            waiting.append((0, origin + at, ()))
            self._begun = True
        seen = set[int]()
        for thread in waiting:
            if self._follow(thread, seen, text, at, origin, ended):
                return

    def _follow(self, thread: _Thread, seen: set[int], text: str, at: int, origin: int, ended: bool) -> bool:
        """Follow one thread; return whether it matched, so that those behind it do not count."""
        code, stack = self.pattern.code, [thread]
        while stack:
            place, begin, saves = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            match code[place]:
                case Take():
                    self.threads.append((place, begin, saves))
                case Split(first, second):
                    stack += [(second, begin, saves), (first, begin, saves)]
                case Save(mark):
                    stack.append((place + 1, begin, (*saves, (mark, origin + at))))
                case Matched():
                    self.found = (begin, origin + at, saves)
                    return True
                case check:
                    if _holds(check, text, at, origin, ended):
                        stack.append((place + 1, begin, saves))
        return False

    def consume(self, char: str, place: int) -> None:
        """Take the character at the absolute `place`."""
        code, oldest = self.pattern.code, place - MAX_CHARS
        kept: list[_Thread] = []
        for at, begin, saves in self.threads:
            step = code[at]
            if begin > oldest and isinstance(step, Take) and step.chars(char):
                kept.append((at + 1, begin, saves))
        self.threads = kept


def _holds(check: Check, text: str, at: int, origin: int, ended: bool) -> bool:
    if check.ahead is not None:
        return check.ahead.fits(text, at, ended) == check.wanted
    at_end = ended and at == len(text)
    match check.condition:
        case "^":
            return origin + at == 0
        case "Z":
            return at_end
        case "$":
            return at_end or (ended and text[at:] == "\n")
    sides = [at > 0 and _is_word(text[at - 1]), at < len(text) and _is_word(text[at])]
    return (sides[0] != sides[1]) == (check.condition == "b")


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


class Patterns:
    """Patterns to look for together. The match that begins first counts, of several there the longest, and of these the
    one of the first pattern."""

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns
        self.ahead = max((each.ahead for each in patterns), default=0)
        firsts = [each.first for each in patterns]
        known = "|".join(firsts) if all(firsts) else r"[\s\S]"
        self.first = re.compile(known if patterns else r"(?!)", re.DOTALL)
        self.others = re.compile(rf"(?:(?!{known})[\s\S])+" if patterns else r"[\s\S]+", re.DOTALL)


class Finder:
    """The search for patterns in a text that still grows. `hold` is the absolute place before which nothing matches."""

    def __init__(self, patterns: Patterns, begin: int, *, anchored: bool = False) -> None:
        self._patterns = patterns
        self._searches = [_Search(each, anchored=anchored) for each in patterns.patterns]
        self._place, self._is_closed, self._anchored = begin, False, anchored
        self.hold = begin

    @property
    def idle(self) -> bool:
        """Return whether no attempt is under way."""
        return not self._is_closed and all(search.idle for search in self._searches)

    @property
    def failed(self) -> bool:
        """Return whether an anchored search cannot match any more."""
        return self._anchored and self._is_closed and all(search.idle for search in self._searches)

    def look(self, text: str, origin: int, begin: int, *, ended: bool) -> Found | None:
        """Read on in the text, whose first character is `origin` of the whole and whose unread part begins at the
        absolute place `begin`. Return the match that counts; None if more text must come, or it has ended."""
        self._place = max(self._place, begin)
        while self._is_closed or self._close(text, origin, ended):
            at = self._place - origin
            if (found := self._decided(at == len(text) and ended)) is not None:
                return found
            if at == len(text) or self.failed:
                return None
            for search in self._searches:
                search.consume(text[at], self._place)
            self._place, self._is_closed = self._place + 1, False
        return None

    def _close(self, text: str, origin: int, ended: bool) -> bool:
        """Begin attempts at the next place at which one may match. False if the text at hand has none."""
        at = self._place - origin
        if self.idle and not self._anchored:
            following = self._patterns.first.search(text, at)
            at = following.start() if following is not None else len(text)
            self._place = self.hold = origin + at
            if following is None and not (ended and self._patterns.ahead):
                return False
        if len(text) - at < self._patterns.ahead and not ended:
            return False
        for search in self._searches:
            search.close(text, at, origin, ended)
        self._is_closed = True
        return True

    def _decided(self, at_end: bool) -> Found | None:
        """Return the match that no attempt under way can precede."""
        best: Found | None = None
        pending = sys.maxsize
        for number, search in enumerate(self._searches):
            if at_end:
                search.threads.clear()
            if search.found is None or search.threads:
                pending = min(pending, search.begin)
                continue
            found = Found(number, *search.found)
            if best is None or (found.begin, -found.end) < (best.begin, -best.end):
                best = found
        self.hold = min(self._place, pending, sys.maxsize if best is None else best.begin)
        return best if best is not None and best.begin < pending else None


class Match(NamedTuple):
    """Text that was found: with the number of its pattern, and the texts of groups in it."""

    number: int
    text: str
    groups: Mapping[str, str]


def find(cursor: Cursor, patterns: Patterns, sink: Sink) -> Reading[Match | None]:
    """Take the first match; the text before it goes to `sink`. Return None at the end of the text."""
    finder = Finder(patterns, cursor.taken)
    while True:
        found = finder.look(cursor.text, cursor.origin, cursor.taken, ended=cursor.ended)
        if finder.hold > cursor.taken:
            sink(cursor.take(finder.hold - cursor.taken))
        if found is not None:
            return _taken(cursor, patterns, found)
        if cursor.ended:
            return None
        if finder.idle and cursor.record is None:
            yield from cursor.wait_for_text(patterns.others, sink)
        else:
            yield


def matched(cursor: Cursor, patterns: Patterns) -> Reading[Match | None]:
    """Take the match that begins here; return None, and take nothing, if there is none."""
    finder = Finder(patterns, cursor.taken, anchored=True)
    while True:
        found = finder.look(cursor.text, cursor.origin, cursor.taken, ended=cursor.ended)
        if found is not None:
            return _taken(cursor, patterns, found)
        if finder.failed or cursor.ended:
            return None
        yield


def _taken(cursor: Cursor, patterns: Patterns, found: Found) -> Match:
    text, names = cursor.take(found.end - found.begin), patterns.patterns[found.number].names
    places = dict(found.saves)
    groups = {
        name: text[places[2 * i] - found.begin : places[2 * i + 1] - found.begin]
        for i, name in enumerate(names)
        if 2 * i + 1 in places and places[2 * i] <= places[2 * i + 1]
    }
    return Match(found.number, text, groups)
