"""Whether the test that a mutant names exists: its file and function by the sources, its case by collection."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from tests.mutants.mutant import REPOSITORY, statements_around

TESTS: Final = REPOSITORY / "tests"
_NODE_ID: Final = re.compile(r"(?P<file>[\w/]+\.py)::(?P<name>test_\w+)(?P<case>\[.*\])?")
_read = cache(Path.read_text)


def missing(test: str) -> str:
    """Return why a node id below `tests/` names no test; "" if it names one. Of a case only is known here that its test
    has cases."""
    node_id = _NODE_ID.fullmatch(test)
    if node_id is None:
        return f"{test} is no file, test and case"
    path = TESTS / node_id["file"]
    if not path.is_file():
        return f"{node_id['file']} does not exist"
    source = _read(path)
    found = re.search(rf"^(async )?def {node_id['name']}\(", source, re.MULTILINE)
    if found is None:
        return f"{node_id['file']} has no test {node_id['name']}"
    if node_id["case"] and not _may_have_cases(statements_around(source, *found.span()), node_id["name"]):
        return f"{node_id['name']} has no parameters, and no case {node_id['case']}"
    return ""


def _may_have_cases(statements: str, name: str) -> bool:
    """Return whether a function has parameters, or fixtures, which may have some."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    (test,) = (node for node in ast.parse(statements).body if isinstance(node, functions) and node.name == name)
    return bool(test.args.args)


def uncollected(tests: Iterable[str]) -> set[str]:
    """Return those of some node ids below `tests/` that pytest does not collect."""
    wanted = {f"tests/{test}" for test in tests}
    files = sorted({test.partition("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run([*command, *files], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    collected = set(done.stdout.splitlines())
    collected |= {line.partition("[")[0] for line in collected}
    return wanted - collected
