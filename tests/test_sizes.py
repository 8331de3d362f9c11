"""One object, one concern: how complex a function, how large an object, and no chain of classes that one object is.

Today's exceptions stand below with their numbers, which may only fall. Lengths of files and functions are no gate:
`python scripts/shape.py` prints the long ones for a review.
"""

from __future__ import annotations

import ast
from functools import cache
from textwrap import dedent

import pytest

from scripts.shape import (
    LONG_FILE,
    LONG_FUNCTION,
    MAX_COMPLEXITY,
    MAX_METHODS,
    PACKAGE,
    Classes,
    complex_functions,
    complexity,
    files,
    long_files,
    long_functions,
    parsed,
)
from tests.imports import syntax

COMPLEX_FUNCTIONS: dict[str, int] = {}
LARGE_OBJECTS: dict[str, int] = {}
CHAINS: set[str] = set()


@cache
def trees() -> dict[str, ast.Module]:
    return {path: syntax(text) for path, text in files().items() if path.endswith(".py")}


@cache
def classes() -> Classes:
    return Classes(trees())


def check_limits(found: dict[str, int], allowed: dict[str, int], what: str) -> None:
    """Fail for what exceeds its allowed number, or is allowed without need."""
    grown = {name: (allowed.get(name, 0), count) for name, count in found.items() if count > allowed.get(name, 0)}
    assert not grown, f"{what} (allowed, found): {grown}"
    done = allowed.keys() - found.keys()
    assert not done, f"within the limit now, or gone: take out of the list: {sorted(done)}"


def function(source: str) -> ast.FunctionDef:
    found = ast.parse(dedent(source)).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


# -- the package -------------------------------------------------------------------------------------------------------


def test_no_function_is_too_complex() -> None:
    check_limits(complex_functions(trees()), COMPLEX_FUNCTIONS, f"complexity above {MAX_COMPLEXITY}: name its parts")


def test_no_object_has_too_many_methods() -> None:
    check_limits(classes().large_objects(), LARGE_OBJECTS, f"more than {MAX_METHODS} methods: compose it by concern")


def test_no_object_is_a_chain_of_classes() -> None:
    found, allowed = (dict.fromkeys(names, 1) for names in (classes().chains(), CHAINS))
    check_limits(found, allowed, "one subclass, and no third file names the class: compose, or merge the two")


def test_the_scheduler_fits_on_a_page() -> None:
    page = (PACKAGE.parent / "docs" / "scheduler-in-one-page.md").read_text()
    assert len(page.split("```")[1].strip().splitlines()) <= 60


# -- the measures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("return 1", 1),
        ("if a and b or c:\n        return 1", 4),
        ("return [x for x in a if x if x > 1]", 4),
        ("return 1 if a else 2", 2),
        ("try:\n        f()\n    except A:\n        pass\n    except B:\n        pass", 3),
        ("match a:\n        case 1:\n            pass\n        case _:\n            pass", 3),
        ("while a:\n        for x in b:\n            pass", 3),
        ("def inner():\n        if a: pass\n    return inner", 1),
        ("return lambda: a and b", 2),
    ],
)
def test_complexity_counts_each_further_path(body: str, count: int) -> None:
    assert complexity(function(f"def f():\n    {body}\n")) == count


def test_complex_function_is_named_with_its_class() -> None:
    branches = "\n".join("        if a: pass" for _ in range(MAX_COMPLEXITY))
    source = f"class A:\n    def f():\n{branches}\n    def g():\n        if a: pass\n"
    assert complex_functions(parsed({"x/a.py": source})) == {"x/a.py:A.f": MAX_COMPLEXITY + 1}


def test_complex_function_before_a_simple_one_of_the_same_name_is_found() -> None:
    branches = "\n".join("    if a: pass" for _ in range(MAX_COMPLEXITY))
    source = f"def _():\n{branches}\ndef _():\n    pass\n"
    assert complex_functions(parsed({"x/a.py": source})) == {"x/a.py:_": MAX_COMPLEXITY + 1}


def _methods(*names: str) -> str:
    return "".join(f"    def {name}(self): ...\n" for name in names)


def test_methods_of_bases_in_other_files_count_once() -> None:
    sources = {
        "a/base.py": "class Base(External):\n" + _methods(*(f"f{i}" for i in range(MAX_METHODS))),
        "a/__init__.py": "from forebay.a.base import Base as Root",
        "b/own.py": "from forebay.a import Root\nclass Own(Root):\n" + _methods("f0", "g"),
        "b/other.py": "from forebay.a import base\nclass Other(base.Base[int]):\n" + _methods("f0", "f1"),
    }
    assert Classes(parsed(sources)).large_objects() == {"b/own.py:Own": MAX_METHODS + 1}


def test_chain_is_a_class_that_only_its_one_subclass_names() -> None:
    sources = {
        "a.py": "class Half: ...\nclass Shared: ...\nclass Two: ...\nclass Values(Protocol): ...\nclass Lone: ...\n",
        "b.py": (
            "from forebay.a import Half, Shared, Two, Values\nclass Whole(Half): ...\nclass User(Shared): ...\n"
            "class One(Two): ...\nclass Other(Two): ...\nclass Has(Values): ...\n"
        ),
        "c.py": "from forebay.a import Shared\n",
    }
    assert Classes(parsed(sources)).chains() == {"a.py:Half"}


def test_chain_of_dataclasses_is_none() -> None:
    source = "@dataclass(frozen=True)\nclass A: ...\nclass B(A): ...\nclass C(B): ...\n"
    assert Classes(parsed({"a.py": source})).chains() == set()


def test_limit_fails_for_growth_and_for_an_exception_without_need() -> None:
    check_limits({"a": 13}, {"a": 14}, "")
    for found, allowed in (({"a": 15}, {"a": 14}), ({"a": 13}, {}), ({}, {"a": 14})):
        with pytest.raises(AssertionError):
            check_limits(found, allowed, "")


@pytest.mark.parametrize("name", ["memory/x.py", "ops/cpu/x.cpp"])
def test_long_file_is_one_with_a_line_too_many(name: str) -> None:
    assert long_files({name: "x\n" * LONG_FILE}) == {}
    assert long_files({name: "x\n" * (LONG_FILE + 1)}) == {name: LONG_FILE + 1}


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n"])
def test_long_function_is_one_with_a_line_too_many(head: str) -> None:
    body = "    x = 1\n" * (LONG_FUNCTION - 1)
    assert long_functions(parsed({"a.py": head + body})) == {}
    assert long_functions(parsed({"a.py": head + body + "    x = 1"})) == {"a.py:f": LONG_FUNCTION + 1}
