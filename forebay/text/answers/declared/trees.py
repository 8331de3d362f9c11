"""Regular expressions as trees, for matching them and for writing grammars of what they match.

The syntax is that of Python's `re`, with `.` for any character. Not supported are what no automaton has (references,
recursion, atomic groups), look-behind, and flags other than `s` and `i`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, TypeAlias

_MAX_SOURCE: Final = 2048
_MAX_DEPTH: Final = 32
_MAX_AHEAD: Final = 64  # characters that a look-ahead may examine
_MAX_RUNS: Final = 256
_CLASSES: Final = "sSwWdD"
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_COUNTS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]+)\)")
_NAMED: Final = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")
_ANY: Final = r"[\s\S]"


@dataclass(frozen=True, slots=True)
class Char:
    """One character, as a class of `re` has it; `literal` is the only one, if there is only one."""

    source: str
    literal: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """Parts behind each other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives, the preferred one first."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `least` times or more, `most` at most unless None."""

    part: Node
    least: int
    most: int | None
    lazy: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A part whose text has a name."""

    part: Node
    name: str


@dataclass(frozen=True, slots=True)
class Assertion:
    """A condition of the place: `^`, `$`, `Z` (the end), `b`, `B`."""

    kind: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """Condition of the text behind a place: it matches, or with `wanted` false does not."""

    part: Node
    wanted: bool


Node: TypeAlias = Char | Chain | Choice | Repeat | Group | Assertion | Ahead


class PatternError(ValueError):
    """The pattern is malformed, too large, or of a kind that is not supported."""


class _Parser:
    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE:
            raise PatternError(f"a pattern of {len(source)} characters: at most {_MAX_SOURCE}")
        self._source, self._at, self._depth, self._ignores_case = source, 0, 0, False
        while flags := _FLAGS.match(source, self._at):
            if set(flags[1]) - {"s", "i"}:
                raise PatternError(f"the flags {flags[1]!r} are not supported")
            self._ignores_case = self._ignores_case or "i" in flags[1]
            self._at = flags.end()

    def whole(self) -> Node:
        node = self._choice()
        if self._at < len(self._source):
            raise PatternError(f"an unbalanced bracket at {self._at} of {self._source!r}")
        return node

    def _takes(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise PatternError(f"{self._source!r} ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups are nested more than {_MAX_DEPTH} deep")
        options = [self._chain()]
        while self._takes("|"):
            options.append(self._chain())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _chain(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._part()))
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return part
        lazy = self._takes("?")
        if not lazy and self._takes("+"):
            raise PatternError("possessive repetitions are not supported")
        least, most = counts
        if isinstance(part, Assertion | Ahead) or (most is not None and least > most):
            raise PatternError(f"a repetition of nothing in {self._source!r}")
        if self._counts() is not None:
            raise PatternError(f"a repetition of a repetition in {self._source!r}")
        return Repeat(part, least, most, lazy)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return counts
        match = _COUNTS.match(self._source, self._at)
        if match is None or not (match[1] or match[3]):
            return None
        self._at = match.end()
        if max(len(match[1]), len(match[3])) > 4:
            raise PatternError(f"the repetition {match[0]} is too long")
        least = int(match[1] or 0)
        return least, (int(match[3]) if match[3] else None) if match[2] else least

    def _part(self) -> Node:
        char = self._next()
        match char:
            case "(":
                self._at -= 1
                return self._group()
            case "[":
                return self._class()
            case ".":
                return Char(_ANY)
            case "^" | "$":
                return Assertion(char)
            case "\\":
                return self._escaped()
            case "*" | "+" | "?":
                raise PatternError(f"a repetition of nothing in {self._source!r}")
        return self._literal(char)

    def _literal(self, char: str) -> Char:
        if self._ignores_case and char.lower() != char.upper():
            return Char(f"[{re.escape(char.lower())}{re.escape(char.upper())}]")
        return Char(re.escape(char), char)

    def _escaped(self) -> Node:
        char = self._next()
        if char in _CLASSES:
            return Char(f"\\{char}")
        if char in "AZ":
            return Assertion("^" if char == "A" else "Z")
        if char in "bB":
            return Assertion(char)
        if char in _CODES:
            digits = self._source[self._at : self._at + _CODES[char]]
            self._at += _CODES[char]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_CODES[char]}}}", digits) or int(digits, 16) > 0x10FFFF:
                raise PatternError(f"an incomplete \\{char} in {self._source!r}")
            return self._literal(chr(int(digits, 16)))
        if char in _CONTROLS:
            return self._literal(_CONTROLS[char])
        if char.isalnum():
            raise PatternError(f"\\{char} is not supported")
        return self._literal(char)

    def _class(self) -> Char:
        begin = self._at - 1
        self._takes("^")
        self._takes("]")
        while (char := self._next()) != "]":
            if char == "\\":
                self._next()
        source = self._source[begin : self._at]
        if self._ignores_case:
            source = f"(?i:{source})"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                re.compile(source)
            except (re.error, Warning) as error:
                raise PatternError(f"the class {source}: {error}") from None
        return Char(source)

    def _group(self) -> Node:
        named = _NAMED.match(self._source, self._at)
        if named:
            self._at = named.end()
            return self._closed(Group(self._choice(), named[1]))
        if self._takes("(?:"):
            return self._closed(self._choice())
        for sign, wanted in (("(?=", True), ("(?!", False)):
            if self._takes(sign):
                return self._closed(Ahead(self._choice(), wanted))
        if self._takes("(?"):
            raise PatternError(f"(?{self._source[self._at : self._at + 2]} is not supported")
        self._at += 1
        return self._closed(self._choice())

    def _closed(self, node: Node) -> Node:
        if not self._takes(")"):
            raise PatternError(f"a bracket is missing in {self._source!r}")
        return node


def parsed(source: str) -> Node:
    """Return the tree of a regular expression. Raises PatternError."""
    return _Parser(source).whole()


def literals(words: Sequence[str]) -> Node:
    """Return the tree that matches any of these words, of several that fit the longest."""
    nodes: list[Node] = [Chain(tuple(Char(re.escape(char), char) for char in word)) for word in words]
    ordered = [node for _, node in sorted(zip(words, nodes, strict=True), key=lambda pair: -len(pair[0]))]
    return ordered[0] if len(ordered) == 1 else Choice(tuple(ordered))


def group_names(node: Node) -> Iterator[str]:
    """Yield the names of all groups."""
    if isinstance(node, Group):
        yield node.name
    for part in parts_of(node):
        yield from group_names(part)


def parts_of(node: Node) -> tuple[Node, ...]:
    """Return the parts of a node."""
    match node:
        case Chain(parts):
            return parts
        case Choice(options):
            return options
        case Repeat() | Group() | Ahead():
            return (node.part,)
    return ()


def without_space(node: Node) -> Node:
    """Return the tree without the white space that may come first."""
    if not isinstance(node, Chain) or len(node.parts) < 2:
        return node
    first, *others = node.parts
    if first == Repeat(Char(r"\s"), 0, None, lazy=False):
        return others[0] if len(others) == 1 else Chain(tuple(others))
    return node


def least_chars(node: Node) -> int:
    """Return the length of the shortest text that matches."""
    match node:
        case Char():
            return 1
        case Chain(parts):
            return sum(map(least_chars, parts))
        case Choice(options):
            return min(map(least_chars, options))
        case Repeat():
            return node.least * least_chars(node.part)
        case Group():
            return least_chars(node.part)
    return 0


def _most_chars(node: Node) -> int:
    """Return the length of the longest text that matches, or something above `_MAX_AHEAD`."""
    match node:
        case Char():
            return 1
        case Chain(parts):
            return sum(map(_most_chars, parts))
        case Choice(options):
            return max(map(_most_chars, options))
        case Repeat():
            most = _MAX_AHEAD + 1 if node.most is None else node.most
            return min(_MAX_AHEAD + 1, most * _most_chars(node.part))
        case Group():
            return _most_chars(node.part)
    return 0


def ahead_chars(node: Node) -> int:
    """Return how many characters behind a place must be known to decide on the conditions of a pattern there."""
    if isinstance(node, Assertion):
        return {"$": 2, "^": 0}.get(node.kind, 1)
    inside = max(map(ahead_chars, parts_of(node)), default=0)
    if not isinstance(node, Ahead):
        return inside
    length = _most_chars(node.part) + inside
    if length > _MAX_AHEAD:
        raise PatternError(f"a look-ahead of unlimited length: at most {_MAX_AHEAD} characters")
    return length


def runs(node: Node) -> list[str]:
    """Return the texts without variable characters that are part of what matches, joined as far as possible."""
    found: list[str] = []
    ends = _runs(node, [""], found)
    return [run for run in dict.fromkeys([*found, *ends]) if run]


_TOKEN_LIKE: Final = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")


def beginnings(node: Node) -> tuple[list[str], Node]:
    """Return the texts with one of which every match begins, and the tree of what follows them. A text ends with the
    first token in it, as far as its spelling tells. None at all if a match may begin with anything."""
    parts = node.parts if isinstance(node, Chain) else (node,)
    if parts and isinstance(parts[0], Choice):
        options = [literal_text(option) for option in parts[0].options]
        return (list(filter(None, options)), Chain(parts[1:])) if all(options) else ([], node)
    run = "".join(takewhile(bool, (part.literal if isinstance(part, Char) else "" for part in parts)))
    token = _TOKEN_LIKE.match(run)
    end = token.end() if token else len(run)
    return [run[:end]] if run else [], Chain(parts[end:])


def literal_text(node: Node) -> str | None:
    """Return the only text that matches, of alternatives the first; None if there are others."""
    match node:
        case Char(_, literal):
            return literal or None
        case Chain(parts):
            texts = [literal_text(part) for part in parts]
            return None if None in texts else "".join(text or "" for text in texts)
        case Choice(options):
            return literal_text(options[0])
        case Group(part, _):
            return literal_text(part)
    return None


def _runs(node: Node, before: list[str], found: list[str]) -> list[str]:
    """Return all continuations of `before`; those that cannot be continued go to `found`."""
    match node:
        case Char(_, literal) if literal:
            return [run + literal for run in before]
        case Chain(parts):
            for part in parts:
                before = _runs(part, before, found)
            return before
        case Choice(options):
            ends = [end for option in options for end in _runs(option, before, found)]
            return list(islice(dict.fromkeys(ends), _MAX_RUNS))
        case Group(part, _):
            return _runs(part, before, found)
        case Repeat(part, 0 | 1, 1, _):
            return list(islice(dict.fromkeys([*_runs(part, before, found), *before]), _MAX_RUNS))
        case Assertion():
            return before
    found += before
    for part in parts_of(node):
        found += _runs(part, [""], found)
    return [""]
