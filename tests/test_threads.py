"""Threads of the package end with the process: each is a daemon, so that none holds it up at its end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.imports import nodes_of

PACKAGE = Path(__file__).parents[1] / "forebay"


def threads(source: str) -> Iterator[ast.Call]:
    """Yield the calls that make a thread."""
    for node in nodes_of(source) if "Thread" in source else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
            yield node


def is_daemon(call: ast.Call) -> bool:
    return any(
        keyword.arg == "daemon" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def test_threads_of_the_package_are_daemons() -> None:
    found = [(path, call) for path in PACKAGE.rglob("*.py") for call in threads(path.read_text())]
    assert len(found) > 10
    others = [f"{path.relative_to(PACKAGE)}:{call.lineno}" for path, call in found if not is_daemon(call)]
    assert not others, f"start these with daemon=True: {others}"
