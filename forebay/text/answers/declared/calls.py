"""Calls of tools in a declared region, by the readers of the built-in formats where the shape is theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec

from forebay.base import json_text
from forebay.text.answers.answer import Answer
from forebay.text.answers.calls import TOOL_NAME, Body, Objects, is_json, python
from forebay.text.answers.cursor import Reading
from forebay.text.answers.declared.contents import Ended, member, types_in, write_content
from forebay.text.answers.declared.declaration import (
    CallShape,
    Captured,
    Json,
    Made,
    Python,
    Region,
    Source,
    Within,
)
from forebay.text.answers.declared.patterns import Match, Patterns, matched
from forebay.text.answers.python_values import quoted

_WHOLE: Final = Within(())
_MAX_CALLS: Final = 1000  # of one list


@dataclass(frozen=True)
class RegionCalls:
    """Reads the calls of a region of this shape, behind the match that opened it."""

    region: Region
    shape: CallShape

    @cached_property
    def listed(self) -> Body | None:
        """The reader of a built-in format that reads the region; None if the shape is of no such format."""
        content, (name, arguments, _) = self.region.content, self.shape
        if isinstance(content, Python) and (name, arguments) == (Within(("name",)), Within(("arguments",))):
            return python
        if not (isinstance(content, Json) and content.plain):
            return None
        if isinstance(name, Within) and isinstance(arguments, Within) and len(name.keys) == len(arguments.keys) == 1:
            return Objects(name.keys[0], arguments.keys)
        return None

    @cached_property
    def copies(self) -> bool:
        """Return whether the content is the arguments of one call, whose name is known before."""
        name = self.shape.name
        known = isinstance(name, str) or (isinstance(name, Captured) and not name.late)
        return known and self.shape.arguments == _WHOLE and not self.shape.each

    @cached_property
    def _closes(self) -> Patterns:
        return Patterns(*filter(None, [self.region.closes]))

    def read(self, answer: Answer, opened: Match, *, known: bool) -> Reading[None]:
        """Read the calls; with `known` only those of tools that there are. What is no call stays recorded."""
        before = answer.calls
        if self.listed is not None:
            yield from self.listed(answer, known)
            closed = False
        elif self.copies:
            closed = yield from self._copied(answer, opened, known)
        else:
            closed = yield from self._held(answer, opened, known)
        if answer.calls == before:
            return
        if not closed and (yield from matched(answer.cursor, self._closes)) is None:
            yield from answer.cursor.spaces()
            yield from matched(answer.cursor, self._closes)
        answer.layout()

    def _copied(self, answer: Answer, opened: Match, known: bool) -> Reading[bool]:
        name, cursor = _text_of(self.shape.name, opened), answer.cursor
        if not TOOL_NAME.fullmatch(name) or (known and name not in answer.tools):
            return False
        content = self.region.content
        if isinstance(content, Json) and not content.lax:
            yield from cursor.spaces()
            if (yield from cursor.peek()) != "{":
                return False
        answer.begin(name)
        types = types_in(answer.tools.get(name, {}))
        ended: Ended = yield from write_content(cursor, answer.argue, content, types, self.region.closes)
        answer.end()
        return ended.behind is not None

    def _held(self, answer: Answer, opened: Match, known: bool) -> Reading[bool]:
        """Read to the end of the region, and make calls of what it has."""
        pieces: list[str] = []
        types = types_in({})
        ended = yield from write_content(answer.cursor, pieces.append, self.region.content, types, self.region.closes)
        behind, value = ended.behind, "".join(pieces)
        if behind is None and ended.whole:
            yield from answer.cursor.spaces()
            behind = yield from matched(answer.cursor, self._closes)
        groups = {**opened.groups, **(behind.groups if behind is not None else {})}
        made = list(self._made(value, groups)) if ended.whole and is_json(value) else []
        if any(not TOOL_NAME.fullmatch(name) or (known and name not in answer.tools) for name, _ in made):
            return False
        for name, arguments in made:
            answer.begin(name)
            answer.argue(arguments)
            answer.end()
        return behind is not None

    def _made(self, value: str, groups: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield names of calls, and the JSON of their arguments."""
        values = [value]
        if self.shape.each:
            if not value.lstrip().startswith("["):
                return
            values = [bytes(each).decode() for each in json_text.decode(value, type=list[msgspec.Raw])[:_MAX_CALLS]]
        for each in values:
            name = _json_of(self.shape.name, each, groups)
            arguments = "{}" if self.shape.arguments is None else _json_of(self.shape.arguments, each, groups)
            if name is None or not name.startswith('"') or arguments is None:
                return
            yield json.loads(name), _as_object(arguments)


def _text_of(source: Source, opened: Match) -> str:
    if isinstance(source, Captured):
        return opened.groups.get(source.group, "").strip()
    return source if isinstance(source, str) else ""


def _json_of(source: Source | Any, value: str, groups: Mapping[str, str]) -> str | None:
    """Return the JSON of a source; None if it is not there."""
    match source:
        case Captured(group, _):
            return quoted(groups[group].strip()) if group in groups else None
        case Within(keys):
            return member(value, keys)
        case Made(tree) if isinstance(tree, dict):
            members = {key: _json_of(each, value, groups) for key, each in tree.items()}
            if None in members.values():
                return None
            return "{" + ", ".join(f"{quoted(str(key))}: {each}" for key, each in members.items()) + "}"
        case Made(tree):
            return json.dumps(tree, ensure_ascii=False)
    return quoted(source)


def _as_object(arguments: str) -> str:
    """Return arguments that are an object in a JSON string, or null, as the object."""
    if arguments.startswith('"'):
        inner = json.loads(arguments)
        return inner if inner.lstrip().startswith("{") and is_json(inner) else arguments
    return "{}" if arguments == "null" else arguments
