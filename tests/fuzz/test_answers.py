"""What a model may say: it is read in whatever pieces, nothing of it is lost, and it is never run."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from forebay.text.answers.formats import THINK_TAGS
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Part, Said, Thought
from forebay.text.answers.reading import AnswerReader, reader_for
from tests.fuzz.mutants import fuzz, mutated, pieces, seeds
from tests.text.answers.spellings import ANSWERS, SPELLINGS, TOOLS

KINDS = (Said, Thought, CallArguments)


class Case(NamedTuple):
    name: str
    opened: bool
    parts: list[str]


def make(rng: random.Random) -> Case:
    name = rng.choice(list(SPELLINGS))
    corpus = [SPELLINGS[name].spell(answer) for answer in ANSWERS]
    return Case(name, rng.random() < 0.2, pieces(rng, mutated(rng, corpus)))


def read(reader: AnswerReader, texts: list[str], *, fast: bool = False) -> list[Part]:
    """Each part as it comes; what is settled never comes back, and is of one kind."""
    parts: list[Part] = []
    length = settled = 0
    for text in texts:
        part = reader.pass_by(text) if fast else None
        parts += reader.push(text) if part is None else [part]
        length += len(text)
        assert settled <= reader.settled <= length
        settled = reader.settled
    parts += reader.finish()
    assert reader.settled == length
    return parts


def joined(parts: list[Part]) -> list[Any]:
    """Neighbours of a kind as one."""
    found: list[Any] = []
    for part in parts:
        if found and isinstance(part, KINDS) and type(found[-1]) is type(part) and found[-1][:-1] == part[:-1]:
            found[-1] = part._replace(text=found[-1].text + part.text)
        else:
            found.append(part)
    return found


def check(case: Case) -> None:
    formats = SPELLINGS[case.name].formats
    text = "".join(case.parts)
    reader = reader_for(formats, TOOLS, opened=case.opened)
    parts = joined(read(reader, case.parts))
    assert parts == joined(read(reader_for(formats, TOOLS, opened=case.opened), [text]))
    assert parts == joined(read(reader_for(formats, TOOLS, opened=case.opened), case.parts, fast=True))
    begun = [part.call for part in parts if isinstance(part, CallBegun)]
    assert begun == [part.call for part in parts if isinstance(part, CallEnded)] == list(range(len(begun)))
    for kind in KINDS[:2]:  # copied character for character, in the order in which they stand there
        told = "".join(part.text for part in parts if isinstance(part, kind))
        of_kind = (at for at in range(len(text)) if reader.kind(at, at + 1) is kind)
        assert is_within(told, "".join(text[at] for at in of_kind))
    if not begun and formats.thinking in THINK_TAGS:
        told = "".join(part.text for part in parts if isinstance(part, Said | Thought))
        tags = THINK_TAGS[formats.thinking]
        layout = (*tags.layout, *(formats.call_format.layout if formats.call_format else ()))
        opens, closes, label = (visible(word, ()) for word in (tags.opens, tags.closes, tags.label))
        lost = visible(text, layout) - visible(told, layout)
        around = {0, opens, closes, opens + closes, opens + label, opens + label + closes}
        assert lost in around, "only the tags around the thinking are no text"


def visible(text: str, layout: tuple[str, ...]) -> int:
    """The number of characters that are neither white space nor layout."""
    for word in layout:
        text = text.replace(word, "")
    return len("".join(text.split()))


def is_within(part: str, whole: str) -> bool:
    """Whether it is `whole` less some of its characters."""
    rest = iter(whole)
    return all(char in rest for char in part)


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_d7_answers_are_read_the_same_however_they_come(seed: int) -> None:
    fuzz(seed, 400, make, check)


def test_these_answers_have_calls() -> None:
    cases = [make(random.Random(number)) for number in range(100)]
    parts = [
        part for case in cases for part in reader_for(SPELLINGS[case.name].formats, TOOLS).push("".join(case.parts))
    ]
    assert sum(isinstance(part, CallEnded) for part in parts) > 20
