"""An answer's parts, joined to what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from forebay.base.errors import Unavailable
from forebay.server.generation import Choice, Generation
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought


class Call(NamedTuple):
    """`arguments` as the model wrote them: an object of JSON, unless it was cut off or is no JSON."""

    name: str
    arguments: str


Item: TypeAlias = Said | Thought | Call


def items_of(parts: Sequence[Part]) -> list[Item]:
    """In the answer's order; neighbours of a kind are one."""
    items: list[Item] = []
    for _, run in groupby(parts, _whose):
        first, *others = run
        text = "".join(part.text for part in others if not isinstance(part, CallBegun | CallEnded))
        if isinstance(first, Said | Thought):
            items.append(first._replace(text=first.text + text))
        elif isinstance(first, CallBegun):
            items.append(Call(first.name, text))
    return items


def _whose(part: Part) -> object:
    return part.call if isinstance(part, CallBegun | CallArguments | CallEnded) else type(part)


def parts_of(choice: Choice, text: str, parts: Sequence[Part]) -> Sequence[Part]:
    """Of an answer or of a piece of one; where nobody reads it, it is text."""
    if choice.prompt.reading is not None:
        return parts
    return [Said(text)] if text else []


def the_choice(generation: Generation) -> Choice:
    """Of an answer that has one. Raises Unavailable where the engine cut it off, for which these dialects have no
    word."""
    (choice,) = generation.choices
    if choice.finish == "abort":
        raise Unavailable("the answer was cut off by the server: send the request again", code="aborted")
    return choice
