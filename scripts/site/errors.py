"""Every code that a client may get: read off the places where errors are made, so that the words are those of the
server, with an ellipsis for what is known only then."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.base import errors
from forebay.base.errors import ConfigError, ForebayError, GenerationError, InvalidRequest, ModelError
from forebay.server.protocol import validation
from scripts.site.tables import code, table

_PACKAGE: Final = Path(errors.__file__).parents[1]
_PLACES: Final = (
    *("server", "http", "route", "engine", "scheduler", "requests", "text", "grammar", "transfer", "runtime", "memory"),
)
_OPERATORS: Final = (ConfigError, ModelError, GenerationError)  # no client's
_KINDS: Final[dict[str, type[ForebayError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ForebayError) and not issubclass(kind, _OPERATORS)
}
_MAKERS: Final = re.compile(rf"\b({'|'.join(_KINDS)}|HttpError|_forbidden|refusal)\b")  # of errors for clients


class Message(NamedTuple):
    code: str
    status: int
    message: str


def page() -> str:
    messages: dict[tuple[int, str], list[str]] = defaultdict(list)
    for message in sorted(every()):
        texts = messages[message.status, message.code]
        if any(map(str.isalpha, message.message)) or not texts:  # others are put together elsewhere
            texts.append(message.message)
    rows = [
        (code(name), "<br>".join(_shown(text) for text in texts), str(status))
        for (status, name), texts in sorted(messages.items())
    ]
    return table(("code", "messages", "status"), rows)


def _shown(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


@cache
def every() -> frozenset[Message]:
    return frozenset(_read())


def sources(wanted: Callable[[Path, str], object] = lambda path, text: True) -> dict[Path, ast.Module]:
    """Return the syntax trees of the `wanted` files of the package by path, without the collector, which takes three
    quarters of the time.

    They are not kept: whatever the process does next, its collector would pass through 700,000 nodes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        texts = {path.relative_to(_PACKAGE): path.read_text() for path in sorted(_PACKAGE.rglob("*.py"))}
        return {path: ast.parse(text) for path, text in texts.items() if wanted(path, text)}
    finally:
        if enabled:
            gc.enable()


def _read() -> Iterator[Message]:
    for tree in sources(lambda path, text: path.parts[0] in _PLACES and _MAKERS.search(text)).values():
        constants = _assigned(tree)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                known = constants | _assigned(function)
                calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
                yield from (message for call in calls if (message := _message_of(call, known)) is not None)


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """What stands for each name, where that is said once and for all or just before."""
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def _message_of(call: ast.Call, known: dict[str, ast.expr]) -> Message | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    named = {word.arg: word.value for word in call.keywords}
    if name in _KINDS and call.args:
        written = _text(named["code"], known) if "code" in named else _KINDS[name].default_code
        return _entry(written, _KINDS[name].status, call.args[0], known)
    if name == "HttpError" and len(call.args) == 2 and isinstance(call.args[0], ast.Constant) and "code" in named:
        return _entry(_text(named["code"], known), int(str(call.args[0].value)), call.args[1], known)
    if name == "_forbidden" and len(call.args) == 2:
        return _entry(_text(call.args[1], known), 403, call.args[0], known)
    if name == "refusal" and len(call.args) == 3 and isinstance(call.args[0], ast.Name):
        return _entry(str(getattr(validation, call.args[0].id, "")), InvalidRequest.status, call.args[2], known)
    return None


def _entry(written: str, status: int, message: ast.expr, known: dict[str, ast.expr]) -> Message | None:
    text = _text(message, known)
    return Message(written, status, text) if written.isidentifier() else None


def _text(node: Any, known: dict[str, ast.expr], depth: int = 3) -> str:
    """Of an expression, with an ellipsis for each part that is not known."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, known, depth) for value in values)
        case ast.FormattedValue(value=value):
            return _text(value, {}, 0)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _text(left, known, depth) + _text(right, known, depth)
        case ast.Name(id=name) if depth and name in known:
            return _text(known[name], known, depth - 1)
    return "…"
