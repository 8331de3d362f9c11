"""Plain technical English: what a program can check of docstrings and of commit subjects.

A docstring's first line says what a function does or what a class is, so it starts with no pronoun. Sentences are
short, and public names have docstrings. The counts of exceptions may only fall; a folder without any is not listed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.subjects import wrong

PACKAGE = Path(__file__).parent.parent / "forebay"
MOST_WORDS = 30
PRONOUNS = {"these", "those", "this", "that", "it", "its", "they", "them", "what", "whatever", "who", "whoever", "whom"}
PRONOUNS |= {"whose", "of"}

STARTS_WITH_A_PRONOUN: dict[str, int] = {}
LONG_SENTENCES: dict[str, int] = {
    "engine": 4,
    "families": 1,
    "formats": 1,
    "grammar": 1,
    "layers": 1,
    "memory": 2,
    "models": 3,
    "ops": 10,
    "requests": 1,
    "runtime": 4,
    "scheduler": 3,
    "server": 5,
    "transfer": 2,
}
WITHOUT_DOCSTRING: dict[str, int] = {
    "base": 40,
    "cli": 63,
    "config": 13,
    "engine": 48,
    "families": 162,
    "formats": 16,
    "grammar": 17,
    "layers": 59,
    "memory": 62,
    "models": 20,
    "ops": 104,
    "pools": 10,
    "requests": 10,
    "route": 27,
    "runtime": 58,
    "scheduler": 50,
    "server": 267,
    "speculation": 3,
    "text": 33,
    "transfer": 128,
    "verify": 5,
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Documented(NamedTuple):
    """A module, class or function, and its docstring ("" for none)."""

    name: str
    text: str
    is_public: bool
    needs_text: bool


def documented(path: str, source: str) -> Iterator[Documented]:
    """Yield all of a file that may have a docstring."""
    tree = ast.parse(source)
    yield Documented(path, ast.get_docstring(tree) or "", False, False)
    yield from _within(path, tree, is_public=True)


def _within(place: str, node: ast.AST, *, is_public: bool) -> Iterator[Documented]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name, public = f"{place}:{child.name}", is_public and not child.name.startswith("_")
            yield Documented(name, ast.get_docstring(child) or "", public, public and not _is_short_property(child))
            if isinstance(child, ast.ClassDef):
                yield from _within(name, child, is_public=public)


def _is_short_property(node: Definition) -> bool:
    return len(node.body) == 1 and any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)


def starts_with_a_pronoun(text: str) -> bool:
    first = re.match(r"[`*]*(\w+)", text)
    return text.lower().startswith("the same") or (first is not None and first[1].lower() in PRONOUNS)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of more than `MOST_WORDS` words; an indented block, as of a table, is none."""
    prose = re.sub(r"(?m)^ {4}.*$", "", text)
    sentences = re.split(r"(?<=[.:;?!])\s+|\n\s*\n", prose)
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def all_documented() -> list[tuple[str, Documented]]:
    """Return the folder of each, too."""
    named = [(path.relative_to(PACKAGE), path) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(name.parts[0], each) for name, path in named for each in documented(str(name), path.read_text())]


def may_only_fall(found: list[tuple[str, str]], known: dict[str, int]) -> None:
    counts = Counter(folder for folder, _ in found)
    for folder, count in counts.items():
        names = [name for place, name in found if place == folder]
        assert count <= known.get(folder, 0), f"{folder}: {count}, where {known.get(folder, 0)} are known: {names}"
    fewer = {folder: counts[folder] for folder, n in known.items() if counts[folder] < n}
    assert not fewer, f"there are fewer now: lower the counts to {fewer}"


def test_docstring_starts_with_a_verb_or_the_noun_it_describes() -> None:
    found = [(folder, each.name) for folder, each in all_documented() if starts_with_a_pronoun(each.text)]
    may_only_fall(found, STARTS_WITH_A_PRONOUN)


def test_docstring_sentences_have_at_most_thirty_words() -> None:
    found = [(folder, each.name) for folder, each in all_documented() for _ in long_sentences(each.text)]
    may_only_fall(found, LONG_SENTENCES)


def test_public_names_have_docstrings() -> None:
    found = [(folder, each.name) for folder, each in all_documented() if each.needs_text and not each.text]
    may_only_fall(found, WITHOUT_DOCSTRING)


def test_language_checks_find_what_is_wrong() -> None:
    source = (
        '"""Of many."""\nclass A:\n    @property\n    def size(self): return 1\n'
        '    def give(self): "What is given."\ndef _own(): ...\n'
    )
    found = [*documented("a.py", source)]
    assert [each.name for each in found if starts_with_a_pronoun(each.text)] == ["a.py", "a.py:A:give"]
    assert [each.name for each in found if each.needs_text and not each.text] == ["a.py:A"]
    assert len(long_sentences("word " * 30 + "word. Short.\n\n    " + "cell " * 40)) == 1
    assert not long_sentences("word " * 29 + "word. " + "word " * 30)


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("disagg: end the session of a ticket that cannot be handled", ""),
        ("base, ops: embed the kernels", ""),
        ("tests: pass on a CPU without AVX2", ""),
        ("What sleeps in the middle is half of all who were asked", "no area"),
        ("memory: adds a pool", "no imperative"),
        ("memory: added a pool", "no imperative"),
        ("memory: " + "a" * 65, "73 characters"),
    ],
)
def test_commit_subject_has_an_area_and_a_verb_and_fits_in_a_line(subject: str, why: str) -> None:
    assert why in wrong(subject)
    assert bool(why) == bool(wrong(subject))
