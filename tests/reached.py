"""The tests that a change of a folder can reach: `python -m tests.reached scheduler` prints their files.

A test is reached if it imports a module of the folder, or one that does, through any number of others. A text that is
a module's name, as the arguments of a process have it, counts as an import. So do the `conftest.py` above a test. The
gates are reached by every change.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.imports import PACKAGE, ROOT, imported_by, modules, name_of, target

TESTS = ROOT / "tests"


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return by each module those that import it, or name it in a text."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        nodes = [*ast.walk(ast.parse(source))]
        used = {target(other, found) for other in imported_by(nodes)} | (_texts(nodes) & found.keys())
        for other in used - {"", name}:
            found[other].add(name)
    return found


def _texts(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the texts that may name a module: of the package's own name only in a list, as a command has it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
        if isinstance(node, ast.List | ast.Tuple):
            words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
            found |= {"forebay.__main__"} if ("-m", "forebay") in pairwise(words) else set()
    return found


def reached(changed: Sequence[str], imported_by: Mapping[str, set[str]]) -> set[str]:
    """Return the changed modules and all that import them, directly or not."""
    found, waiting = set(changed), list(changed)
    while waiting:
        new = imported_by[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def tests_of(area: str) -> list[Path]:
    """Return the files of tests that a change of `area`, a folder or file below `forebay`, can reach.

    Raises SystemExit if there is none of this name.
    """
    within = PACKAGE / area
    changed = [path for path in modules() if path == within.with_suffix(".py") or within in path.parents]
    if not changed:
        raise SystemExit(
            f"AREA={area}: there is no forebay/{area} and no forebay/{area}.py; name a folder, such as scheduler"
        )
    found = reached([name_of(path) for path in changed], graph())
    return [path for path in sorted(TESTS.rglob("test_*.py")) if _is_reached(path, found)]


@cache
def graph() -> dict[str, set[str]]:
    """Return by each module of the package and of the tests those that import it."""
    return importers({name_of(path): path.read_text() for path in [*modules(), *TESTS.rglob("*.py")]})


def _is_reached(path: Path, found: set[str]) -> bool:
    above = [folder / "conftest.py" for folder in path.parents if TESTS in folder.parents]
    return path.parent == TESTS or any(name_of(file) in found for file in [path, *above])


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in tests_of(sys.argv[1].strip("/"))))
