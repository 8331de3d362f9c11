"""Every event of the log, from the calls that write it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.site.tables import code, codes, table

# Functions that are given the event's name, and the names.
NAMED = {
    "progress": ("loading", "writing_weights_cache"),
    "_fail": ("prefix_cache_unusable", "prefix_cache_write_failed"),
    "_answer": ("load_adapter", "unload_adapter"),
    "occupied": ("release", "resume", "pause", "continue", "sleep", "wake_up", "update_weights"),
}
PACKAGE = Path(__file__).resolve().parents[2] / "forebay"


def page() -> str:
    """Return the table of events by name, each with its fields."""
    rows = [(code(name), codes(sorted(fields)) if fields else "") for name, fields in sorted(events().items())]
    return table(("event", "fields"), rows)


def events() -> Mapping[str, set[str]]:
    """Return the fields of each event, by its name; also those that it has only at times."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "event(" in text:
            for function, call in _calls(ast.parse(text), ""):
                written = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
                for name in written or NAMED[function]:
                    found[name] |= set(_fields(call))
    return found


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `event`, each with the name of its function."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event" and node.args:
        yield function, node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, function)


def _fields(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield "request_id" if keyword.arg == "id" else keyword.arg
        else:  # fields of a dictionary that is written there
            for node in ast.walk(keyword.value):
                if isinstance(node, ast.Dict):
                    yield from (key.value for key in node.keys if isinstance(key, ast.Constant))
