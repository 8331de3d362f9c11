"""JSON from a client, parsed once from bytes, with the rules that keep the parser's cost and the result bounded."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from forebay.base.errors import InvalidRequest

MAX_DEPTH: Final = 32
MAX_CONTAINERS: Final = 20_000

# Possessive, and a string that is not closed goes to the end: else each of its quotes would be tried as another start.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises InvalidRequest for what is not UTF-8, not strict JSON (NaN, Infinity, a BOM), nested
    deeper than `MAX_DEPTH`, of more than `MAX_CONTAINERS` objects and lists, or with a key twice in one object."""
    _check_depth(body)
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _invalid(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _invalid("a number has too many digits") from error
    if not isinstance(value, dict):
        raise _invalid(f"it is a {_KINDS.get(type(value), 'value')}, not an object")
    return value


_KINDS: Final = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a JSON object as expected: {what}", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _invalid(f"the key {twice[:64]!a} occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise _invalid(f"{name} is not a JSON number")


def _check_depth(body: bytes) -> None:
    """Before parsing: the parser recurses, and every container costs hundreds of bytes."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise _invalid(f"it has {len(brackets) // 2} lists and objects; at most {MAX_CONTAINERS} are read")
    brackets = brackets.translate(_SQUARE)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    # Each pass removes every innermost level, so what is left is deeper, or not balanced.
    if brackets:
        raise _invalid(f"it is nested deeper than {MAX_DEPTH} levels, or its brackets do not match")
