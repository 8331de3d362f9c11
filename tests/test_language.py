"""Plain technical English: what a program can check of docstrings and of commit subjects.

A docstring's first line says what a function does or what a class is, so it starts with no pronoun. Sentences are
short, and public names have docstrings. Names of functions, classes and parameters have no invented words. The counts
of exceptions may only fall; a folder without any is not listed.
"""

from __future__ import annotations

import ast
import functools
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
LONG_SENTENCES: dict[str, int] = {}
INVENTED = {"who", "whose", "whom", "somebody", "someone", "anybody", "nobody", "everybody", "everyone"}
INVENTED |= {"tell", "tells", "told", "telling", "untold", "news", "wish", "wishes", "wished", "half", "halves"}
INVENTED |= {"guess", "guesses", "guessed", "guessing", "residency", "residencies", "trial", "sit", "desk", "dial"}
"""Words of identifiers that the field has others for; `half` is allowed for half precision and halves of vectors."""
WITH_INVENTED_WORD: dict[str, int] = {"families": 1, "formats": 2, "layers": 1, "ops": 4}
WITHOUT_DOCSTRING: dict[str, int] = {"layers": 20, "memory": 6, "pools": 2, "runtime": 56, "transfer": 14}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Documented(NamedTuple):
    """A module, class or function, and its docstring ("" for none)."""

    name: str
    text: str
    is_public: bool
    needs_text: bool


def documented(sources: dict[str, str]) -> Iterator[Documented]:
    """Yield all that may have a docstring in files, given by their paths within the package."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    bases = Bases(trees)
    for path, tree in trees.items():
        yield Documented(path, ast.get_docstring(tree) or "", False, False)
        yield from _within(path, tree, bases, is_public=True)


def _within(place: str, node: ast.AST, bases: Bases, *, is_public: bool) -> Iterator[Documented]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name, public = f"{place}:{child.name}", is_public and not child.name.startswith("_")
            exempt = _is_short_property(child) or bases.document(place, child.name)
            yield Documented(name, ast.get_docstring(child) or "", public, public and not exempt)
            if isinstance(child, ast.ClassDef):
                yield from _within(name, child, bases, is_public=public)


class Bases:
    """The classes at the top of files, and the base classes that they name in the same file or import from another."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._imported: dict[str, str] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        for path, tree in trees.items():
            self._classes |= {f"{path}:{each.name}": each for each in tree.body if isinstance(each, ast.ClassDef)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    file = node.module.removeprefix("forebay.").replace(".", "/") + ".py"
                    self._imported |= {
                        f"{path}:{each.asname or each.name}": f"{file}:{each.name}" for each in node.names
                    }

    def document(self, place: str, method: str) -> bool:
        """Return whether a class overrides a method that has a docstring in one of its bases, near or far."""
        return any(self._has_text(base, method) or self.document(base, method) for base in self._of(place))

    def _of(self, place: str) -> Iterator[str]:
        for base in self._classes[place].bases if place in self._classes else ():
            name = f"{place.split(':')[0]}:{ast.unparse(base).split('[')[0]}"
            yield self._imported.get(name, name)

    def _has_text(self, place: str, method: str) -> bool:
        body = self._classes[place].body if place in self._classes else []
        methods = [each for each in body if isinstance(each, Definition) and each.name == method]
        return any(ast.get_docstring(each) for each in methods)


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


@functools.cache
def all_documented() -> list[tuple[str, Documented]]:
    """Return the folder of each, too."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [(each.name.split(":")[0].split("/")[0], each) for each in documented(sources)]


def identifiers(source: str) -> Iterator[str]:
    """Yield the names of functions, classes and parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def words(identifier: str) -> set[str]:
    """Return the words of a name in snake_case, CamelCase or UPPER_CASE, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def may_only_fall(found: list[tuple[str, str]], known: dict[str, int]) -> None:
    counts = Counter(folder for folder, _ in found)
    for folder, count in counts.items():
        names = [name for place, name in found if place == folder]
        assert count <= known.get(folder, 0), f"{folder}: {count}, where {known.get(folder, 0)} are known: {names}"
    fewer = {folder: counts[folder] for folder, n in known.items() if counts[folder] < n}
    assert not fewer, f"there are fewer now: lower the counts to {fewer}"


@pytest.mark.long
def test_docstring_starts_with_a_verb_or_the_noun_it_describes() -> None:
    found = [(folder, each.name) for folder, each in all_documented() if starts_with_a_pronoun(each.text)]
    may_only_fall(found, STARTS_WITH_A_PRONOUN)


def test_docstring_sentences_have_at_most_thirty_words() -> None:
    found = [(folder, each.name) for folder, each in all_documented() for _ in long_sentences(each.text)]
    may_only_fall(found, LONG_SENTENCES)


def test_public_names_have_docstrings() -> None:
    found = [(folder, each.name) for folder, each in all_documented() if each.needs_text and not each.text]
    may_only_fall(found, WITHOUT_DOCSTRING)


def test_identifiers_have_no_invented_words() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    found = [
        (path.split("/")[0], f"{path}:{name}")
        for path, source in sources.items()
        for name in identifiers(source)
        if words(name) & INVENTED
    ]
    may_only_fall(found, WITH_INVENTED_WORD)


def test_identifier_words_are_found_in_every_case() -> None:
    source = "class NobodyRuns:\n    def whole(self, HALF_BLOCK, *, wishList, site): ...\nasync def _who(): ..."
    found = [name for name in identifiers(source) if words(name) & INVENTED]
    assert sorted(found) == ["HALF_BLOCK", "NobodyRuns", "_who", "wishList"]


def test_language_checks_find_what_is_wrong() -> None:
    source = (
        '"""Of many."""\nclass A:\n    @property\n    def size(self): return 1\n'
        '    def give(self): "What is given."\ndef _own(): ...\n'
    )
    found = [*documented({"a.py": source})]
    assert [each.name for each in found if starts_with_a_pronoun(each.text)] == ["a.py", "a.py:A:give"]
    assert [each.name for each in found if each.needs_text and not each.text] == ["a.py:A"]
    assert len(long_sentences("word " * 30 + "word. Short.\n\n    " + "cell " * 40)) == 1
    assert not long_sentences("word " * 29 + "word. " + "word " * 30)


def test_override_of_a_documented_method_needs_no_docstring() -> None:
    base = """class Base:
    'A base.'
    def told(self): 'Documented.'
    def untold(self): ...
"""
    near = "from forebay.base.a import Base as B\nclass Near(B[int]):\n    'One.'\n    def told(self): ...\n"
    far = """from forebay.base.b import Near
class Far(Near, other.Base):
    'Another.'
    def told(self): ...
    def untold(self): ...
    def own(self): ...
class Base:
    'Of the same name, and no base.'
    def told(self): ...
"""
    found = documented({"base/a.py": base, "base/b.py": near, "base/c.py": far})
    missing = [each.name for each in found if each.needs_text and not each.text]
    assert missing == [
        "base/a.py:Base:untold",
        *(f"base/c.py:{name}" for name in ("Far:untold", "Far:own", "Base:told")),
    ]


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
