"""The parts of an answer, and the reader that separates them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """A piece of reasoning text."""

    text: str


class CallBegun(NamedTuple):
    """The answer's call number `call`, from 0: the parts of one call follow each other, and those of the next."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments. Joined, they are the model's characters if its format writes JSON, and otherwise JSON
    made from them."""

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
    """Reads one answer as it arrives. The joined parts do not depend on how the text was cut into pieces, no part is
    empty, and text that turns out to be no call is visible text. Only a possible marker is held back. The kinds of the
    first `settled` characters are final."""

    @property
    def settled(self) -> int: ...

    def kind(self, begin: int, end: int) -> Kind:
        """Return the kind of a token's characters: text if one of them is text."""

    def push(self, text: str) -> list[Part]:
        """Read more text of the answer, and return the parts that are certain by now."""

    def pass_by(self, text: str) -> Part | None:
        """Return `text` as a part if it is exactly one part; it then counts as read. Otherwise return None, and `push`
        must read it. This is an optimisation only."""

    def finish(self) -> list[Part]:
        """End the text: return the parts that were held back, and the end of a call that was cut off."""
