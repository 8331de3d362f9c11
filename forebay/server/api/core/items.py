"""An answer's parts, joined to what it is made of: whole, and piece by piece."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple, TypeAlias

from forebay.base.errors import Unavailable
from forebay.engine.client.choice import Choice, Piece
from forebay.server.api.core.dialect import Dialect
from forebay.server.api.core.generation import Generation
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought


class Call(NamedTuple):
    """`arguments` as the model wrote them: an object of JSON, unless it was cut off or is no JSON."""

    name: str
    arguments: str


Item: TypeAlias = Said | Thought | Call


def items_of(parts: Sequence[Part]) -> list[Item]:
    """In the answer's order; neighbours of a kind are one."""
    items: list[Item] = []
    for _, run in groupby(parts, _run_key):
        first, *others = run
        text = "".join(part.text for part in others if not isinstance(part, CallBegun | CallEnded))
        if isinstance(first, Said | Thought):
            items.append(first._replace(text=first.text + text))
        elif isinstance(first, CallBegun):
            items.append(Call(first.name, text))
    return items


def _run_key(part: Part) -> object:
    return part.call if isinstance(part, CallBegun | CallArguments | CallEnded) else type(part)


def parts_of(choice: Choice, text: str, parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts of an answer or of a piece of one; without a reader it is text."""
    if choice.prompt.reading is not None:
        return parts
    return [Said(text)] if text else []


def the_choice(generation: Generation) -> Choice:
    """Return the choice of an answer that has one. Raises Unavailable where the engine cut it off, for which these
    dialects have no word."""
    (choice,) = generation.choices
    if choice.finish == "abort":
        raise Unavailable("the answer was cut off by the server: send the request again", code="aborted")
    return choice


class Kinds(NamedTuple):
    """A dialect's names for text, thinking and calls."""

    said: str
    thought: str
    called: str


class ItemsDialect(Dialect):
    """One whose answers are items, one after the other: at most one is open, and parts are added to that."""

    kinds: ClassVar[Kinds]

    @abstractmethod
    def _within(self, kind: str, text: str) -> bytes:
        """An event that adds `text`, behind those that begin an item where none of this kind is open."""

    @abstractmethod
    def _call(self, name: str) -> bytes:
        """The beginning of a call; nothing is open."""

    @abstractmethod
    def _end(self) -> bytes:
        """Return the end of the open item, b"" if none is open."""

    def text(self, choice: Choice, text: str) -> bytes:
        return self._within(self.kinds.said, text)

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        return b"".join(map(self._part, parts_of(choice, piece.text, piece.parts)))

    def _part(self, part: Part) -> bytes:
        match part:
            case Said(text):
                return self._within(self.kinds.said, text)
            case Thought(text):
                return self._within(self.kinds.thought, text)
            case CallArguments(_, text):
                return self._within(self.kinds.called, text)
            case CallBegun(_, name):
                return self._end() + self._call(name)
            case CallEnded():
                return self._end()
