"""One screen, one thought: how long a file and a function may be.

What is longer stands below with its length, which may only shrink. Triton's kernels are not counted: what one of them
does cannot be cut into functions that run one after the other. Nor is what others wrote and the page carries unchanged.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "forebay"
ELSEWHERE = (PACKAGE / "ops/triton", PACKAGE / "server/console/vendor")
LANGUAGES = (".py", ".cpp", ".h", ".js", ".css", ".html")
LONGEST_FILE = 400
LONGEST_FUNCTION = 45

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def files() -> dict[str, str]:
    """The text of each, by its path in the package."""
    found = (path for path in sorted(PACKAGE.rglob("*")) if path.suffix in LANGUAGES)
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in found if not {*ELSEWHERE} & {*path.parents}}


def long_files(texts: dict[str, str]) -> dict[str, int]:
    return {name: n for name, text in texts.items() if (n := len(text.splitlines())) > LONGEST_FILE}


def long_functions(texts: dict[str, str]) -> dict[str, int]:
    """From `def` to the last line, docstring and inner functions included."""
    return {
        f"{name}: {node.name}": n
        for name, text in texts.items()
        if name.endswith(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (n := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    }


def grown(found: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    """What is too long and not allowed, or longer than that."""
    return {name: length for name, length in found.items() if length > allowed.get(name, 0)}


@pytest.mark.parametrize("name", ["memory/x.py", "ops/cpu/x.cpp"])
def test_a_line_too_many_is_found_in_a_file(name: str) -> None:
    assert not long_files({name: "x\n" * LONGEST_FILE})
    assert long_files({name: "x\n" * (LONGEST_FILE + 1)}) == {name: LONGEST_FILE + 1}


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n"])
def test_a_line_too_many_is_found_in_a_function(head: str) -> None:
    body = "    x = 1\n" * (LONGEST_FUNCTION - 1)
    assert not long_functions({"a.py": head + body})
    in_a_class = "class A:\n" + "".join(f"    {line}\n" for line in (head + body + "    x = 1").splitlines())
    assert long_functions({"a.py": in_a_class}) == {"a.py: f": LONGEST_FUNCTION + 1}


def test_what_is_allowed_may_not_grow() -> None:
    assert grown({"a": 402, "b": 401}, {"a": 401, "b": 402}) == {"a": 402}


def test_no_file_is_too_long() -> None:
    assert grown(long_files(files()), LONG_FILES) == {}


def test_no_function_is_too_long() -> None:
    assert grown(long_functions(files()), LONG_FUNCTIONS) == {}


def test_the_scheduler_fits_on_a_page() -> None:
    page = (PACKAGE.parent / "docs" / "scheduler-in-one-page.md").read_text()
    assert len(page.split("```")[1].strip().splitlines()) <= 60


def test_what_has_become_short_is_allowed_no_longer() -> None:
    found = {**long_files(files()), **long_functions(files())}
    assert {**LONG_FILES, **LONG_FUNCTIONS}.keys() <= found.keys()
