"""Many texts in one piece of memory are the texts that they were."""

from __future__ import annotations

import sys

import pytest

from forebay.formats.strings import Strings

TEXTS = ["", "a", "naïve", "日本語", "", "🙂", "\0"]


def test_texts_are_what_they_were() -> None:
    strings = Strings.of(TEXTS)
    assert [strings[i] for i in range(-len(TEXTS), len(TEXTS))] == TEXTS * 2
    assert [*strings] == TEXTS == strings[:]
    assert (strings[1:-1], strings[::-2]) == (TEXTS[1:-1], TEXTS[::-2])
    assert strings == TEXTS
    assert strings != [*TEXTS[:-1], "b"]
    assert strings != TEXTS[:-1]
    assert Strings([]) == []
    for beyond in (len(TEXTS), -len(TEXTS) - 1):
        with pytest.raises(IndexError):
            strings[beyond]


def test_a_character_in_two_parts_is_no_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        Strings(["é".encode()[:1], "é".encode()[1:]])


def test_a_vocabulary_takes_a_fraction_of_a_list() -> None:
    texts = [f"word{i}" for i in range(1000)]
    strings = Strings.of(texts)
    parts = (getattr(strings, name) for name in strings.__slots__)
    assert sum(map(sys.getsizeof, parts)) * 4 < sum(map(sys.getsizeof, texts))
