"""The parts of an answer, and the reader that separates them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias


class Said(NamedTuple):
    """Text for whoever asked."""

    text: str


class Thought(NamedTuple):
    """A piece of reasoning text."""

    text: str


class CallBegun(NamedTuple):
    """The answer's call number `call`, from 0: the parts of one call follow each other, and those of the next."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: joined they are what the model wrote, character for character where its format
    writes JSON, and JSON that is made of it where it does not."""

    call: int
    text: str


class CallEnded(NamedTuple):
    """The last part of a call, also of one that the end of the answer has cut off."""

    call: int


Part: TypeAlias = Said | Thought | CallBegun | CallArguments | CallEnded


TextKind: TypeAlias = type[Said] | type[Thought]
Kind: TypeAlias = TextKind | type[CallArguments]
"""What a character belongs to: markers to what they enclose, white space that is no part to what it stands beside."""


class Reader(Protocol):
    """Reads one answer as it comes. Parts joined do not depend on how the text was cut into pieces, no part is empty,
    and what turns out to be no call is said. Held back is only what may be a marker. Of the first `settled` characters
    is known what they belong to."""

    @property
    def settled(self) -> int: ...

    def kind(self, begin: int, end: int) -> Kind:
        """Return the kind of a token's characters: text if one of them is text."""

    def push(self, text: str) -> list[Part]:
        """Read more text of the answer, and return the parts that are certain by now."""

    def pass_by(self, text: str) -> Part | None:
        """The part that `text` is where it is one, all of it at once, and nothing else: it is then read. Else None, and
        `push` reads it: this is for speed alone."""

    def finish(self) -> list[Part]:
        """At the end of the text: what was held back, and the end of a call that was cut off."""
