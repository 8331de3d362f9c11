"""What `import forebay` offers, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

import forebay
from forebay.base.errors import ForebayError
from forebay.engine.client.llm import EmbeddingOutput

_ALSO = (EmbeddingOutput,)  # what calls return


def page() -> str:
    offered = [getattr(forebay, name) for name in forebay.__all__ if not name.startswith("__")]
    return "\n\n".join(part for kind in dict.fromkeys((*offered, *_ALSO)) for part in _type(kind))


def _type(kind: type) -> Iterator[str]:
    yield f"## {kind.__name__}"
    if issubclass(kind, Enum):
        yield "\n".join(f"- `{kind.__name__}.{member.name}`: `{member.value}`" for member in kind)
        return
    yield _code(f"class {kind.__name__}", kind)
    yield _text(kind)
    members = {
        name: member
        for base in reversed(kind.__mro__)
        if base.__module__.startswith("forebay.") and not issubclass(ForebayError, base)
        for name, member in vars(base).items()
    }
    for name, member in members.items():
        if name.startswith("_") or not (callable(member) or isinstance(member, classmethod | property)):
            continue
        function = member.fget if isinstance(member, property) else getattr(kind, name)
        if not inspect.getdoc(function) or inspect.isclass(function):
            continue
        yield f"### {kind.__name__}.{name}"
        yield "A property." if isinstance(member, property) else _code(_prefix(member, function) + name, function)
        yield _text(function)


def _prefix(member: Any, function: Any) -> str:
    words = ["classmethod"] if isinstance(member, classmethod) else []
    awaited = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    return " ".join([*words, *(["async"] if awaited else []), "def "])


def _code(name: str, function: Any) -> str:
    """The signature, one parameter a line where it is long."""
    found = inspect.signature(function)
    parts = []
    for part in found.parameters.values():
        if part.kind is part.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if part.name != "self":
            parts.append(re.sub(r": '([^']*)'", r": \1", str(part)).replace("forebay.", ""))
    returns = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"
    return f"```python\n{line}\n```"


def _text(thing: Any) -> str:
    """The docstring, whose indented parts are code."""
    text = inspect.getdoc(thing) or ""
    own = dataclasses.is_dataclass(thing) or (inspect.isclass(thing) and issubclass(thing, msgspec.Struct))
    if own and text.startswith(f"{thing.__name__}("):
        return ""
    blocks = [
        f"```python\n{textwrap.dedent(block)}\n```" if block.startswith("    ") else block
        for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks)
