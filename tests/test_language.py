"""Plain technical English: what a program can check of docstrings and of commit subjects.

A docstring's first line says what a function does or what a class is, so it starts with no pronoun. Sentences are
short, and public names have docstrings. Names of functions, classes and parameters have no invented words. Every
sentence of a docstring and of an error names its subject: the words of `VAGUE` are counted in both. The counts of
exceptions may only fall; a folder without any is not listed.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.subjects import wrong
from tests.imports import nodes_of, syntax, walk

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
VAGUE_VARIABLES = {"rest", "its", "told", "hear", "keeps"}  # each is called what it has instead
WITH_INVENTED_WORD: dict[str, int] = {"formats": 2, "layers": 1, "ops": 4}
WITHOUT_DOCSTRING: dict[str, int] = {"layers": 20, "memory": 4, "pools": 2, "runtime": 52, "transfer": 14}

_VERB = (
    "is|are|was|were|has|have|had|does|do|did|can|cannot|may|must|will|would|needs?|wants?|comes?|goes|stands?|lies|"
    "runs?|exists?|holds?|takes?|gives?"
)
VAGUE = {
    "who": r"who|whom|whoever|whomever|nobody|somebody|someone|anybody|everybody",
    "what": rf"what(?:ever)? (?:{_VERB})",
    "where": rf"where (?:there|it|they|that|this|none|no one|nothing|one|both|all|some|several) (?:{_VERB})|where not|"
    rf"where (?:a|an|the|no|its|some|several|one|another|each) \w+ (?:{_VERB})",
    "so many": "so many|so much|so few|as ever|as many as there",
    "people": "(?:lets?|letting) go|tells?|told|(?:gives?|gave|given|giving) way|(?:goes|go|went|gone|going) on",
    "stands": "(?:stands?|stood)(?! for| in for)|lies|lay",
    "its": r"its(?=[.,;:)]|$)",
}
"""Words by which a sentence leaves its subject, its condition or its number open: name the component, write "if"."""
VAGUE_PATTERNS = {name: re.compile(rf"\b(?:{words})(?!\w)", re.IGNORECASE) for name, words in VAGUE.items()}
MOST_VAGUE = 0.05
"""The part of a folder's docstrings, and of its errors, that may have such words."""
LEEWAY = 5  # texts fewer than a count before it must be lowered, so that branches side by side do not meet there
VAGUE_DOCSTRINGS: dict[str, int] = {}
VAGUE_ERRORS: dict[str, int] = {}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Documented(NamedTuple):
    """A module, class or function, and its docstring ("" for none)."""

    name: str
    text: str
    is_public: bool
    needs_text: bool


def documented(sources: dict[str, str]) -> Iterator[Documented]:
    """Yield all that may have a docstring in files, given by their paths within the package."""
    trees = {path: syntax(source) for path, source in sources.items()}
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
            for node in walk(tree):
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


def vague_words(text: str) -> list[str]:
    """Return the first words of each of the patterns of `VAGUE` in a text; code in backticks is none."""
    prose = re.sub(r"`[^`]*`", "`code`", " ".join(text.split()))
    return [found[0] for pattern in VAGUE_PATTERNS.values() if (found := pattern.search(prose))]


def error_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each error that is raised with one; a value within it is `code`."""
    for node in nodes_of(source) if "raise " in source else ():
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        for argument in node.exc.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value
            elif isinstance(argument, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "`code`" for part in argument.values)
                yield node.lineno, "".join(map(str, parts))


@functools.cache
def all_documented() -> list[tuple[str, Documented]]:
    """Return the folder of each, too."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [(each.name.split(":")[0].split("/")[0], each) for each in documented(sources)]


def identifiers(source: str) -> Iterator[str]:
    """Yield the names of functions, classes and parameters."""
    for node in nodes_of(source):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def variables(source: str) -> Iterator[str]:
    """Yield the names that are assigned, once for each assignment."""
    return (node.id for node in nodes_of(source) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


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


def few_are_vague(texts: list[tuple[str, str, str]], known: dict[str, int]) -> None:
    """Check (folder, place, text): at most `MOST_VAGUE` of a folder's texts are vague, or as many as `known` has."""
    totals = Counter(folder for folder, _, _ in texts)
    found = [(folder, f"{place} {vague}") for folder, place, text in texts if (vague := vague_words(text))]
    counts = Counter(folder for folder, _ in found)
    for folder, total in totals.items():
        names = [name for place, name in found if place == folder]
        most = max(known.get(folder, 0), math.ceil(MOST_VAGUE * total))
        assert counts[folder] <= most, f"{folder}: {counts[folder]} of {total}, at most {most}: {names}"
    fewer = {folder: counts[folder] for folder, n in known.items() if counts[folder] < n - LEEWAY}
    assert not fewer, f"there are fewer now: lower the counts to {fewer}"


@pytest.mark.long
def test_docstrings_and_errors_name_subjects_conditions_and_numbers() -> None:
    few_are_vague([(folder, each.name, each.text) for folder, each in all_documented() if each.text], VAGUE_DOCSTRINGS)
    paths = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    errors = [
        (path.parts[0], f"{path}:{line}", text)
        for path in paths
        for line, text in error_texts((PACKAGE / path).read_text())
    ]
    few_are_vague(errors, VAGUE_ERRORS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Return what is left of it, for whoever asks.", ["whoever", "what is"]),
        ("None where there is no such token.", ["where there is"]),
        ("Use the row where the request has tokens.", ["where the request has"]),
        ("A request goes on as ever; so many wait.", ["as ever", "goes on"]),
        ("Free its pages, and the slot of its.", ["its."]),
        ("The client is told; the page stands behind, the row lies there.", ["told", "stands"]),
        ("PAD stands for no row, and `where there is` is code.", []),
        ("Return its pages, whose slots the file names where possible.", []),
    ],
)
def test_vague_words_are_found_in_every_sentence(text: str, words: list[str]) -> None:
    assert [word.rstrip(".") for word in vague_words(text)] == [word.rstrip(".") for word in words]


def test_error_texts_are_those_of_raised_errors() -> None:
    source = "raise E(f'{n} rows are told', code='x')\nraise E('plain')\nraise e\nE('not raised')\nraise E(1)"
    assert [*error_texts(source)] == [(1, "`code` rows are told"), (2, "plain")]


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
        if words(source) & INVENTED  # else no name has one, and nothing is parsed
        for name in identifiers(source)
        if words(name) & INVENTED
    ]
    may_only_fall(found, WITH_INVENTED_WORD)


def test_variables_have_names_for_what_they_have() -> None:
    likely = re.compile(rf"\b({'|'.join(VAGUE_VARIABLES)})\b[\w*, ()]*(?:=| in )")
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if likely.search(source):  # else nothing is parsed
            assert VAGUE_VARIABLES.isdisjoint(variables(source)), path


def test_variables_are_found_wherever_they_are_assigned() -> None:
    source = "a, (*b, c) = d = e\nfor f in g:\n    [h for h in i]\nwith j as k:\n    (m := n.o)\nn.o = p(q=r)\n"
    assert sorted(variables(source)) == [*"abcdfhkm"]


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
