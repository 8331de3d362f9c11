"""JSON from a client, parsed once from bytes, with the rules that keep the parser's cost and the result bounded."""

from __future__ import annotations

import json
from typing import Any, Final

from forebay.base import json_text
from forebay.base.errors import InvalidRequest

MAX_CONTAINERS: Final = 20_000
MAX_VALUES: Final = 5 * MAX_CONTAINERS  # beside token ids; the objects that are known have fewer each
MAX_STRINGS: Final = 2 * MAX_VALUES  # keys are strings too


def parse_json_object(body: bytes, max_ids: int = 0) -> dict[str, Any]:
    """The object in `body`. Raises InvalidRequest for what is not UTF-8, not strict JSON (NaN, Infinity, a BOM), nested
    deeper than `json_text.MAX_DEPTH`, of more than `MAX_CONTAINERS` objects and lists, `MAX_STRINGS` strings or
    `MAX_VALUES` + `max_ids` values, or with a key twice in one object."""
    _check_size(body, MAX_VALUES + max_ids)
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from error
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


def _check_size(body: bytes, max_values: int) -> None:
    """Before parsing: the parser recurses, and every value costs tens of bytes and is looked at again and again."""
    # Each quote within a string has a backslash before it, so of each string's own two one or both are counted.
    quotes = body.count(b'"') - body.count(b'\\"')
    if quotes > 2 * MAX_STRINGS:
        raise _invalid(f"it has {quotes // 2} strings or more; at most {MAX_STRINGS} are read")
    if not json_text.may_be_deep(body) and body.count(b",") < max_values:
        return
    outside = json_text.outside_strings(body)
    num_values = outside.count(b",") + 1
    if num_values > max_values:
        raise _invalid(f"it has {num_values} values or more; at most {max_values} are read")
    brackets = json_text.brackets_of(outside)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise _invalid(f"it has {len(brackets) // 2} lists and objects; at most {MAX_CONTAINERS} are read")
    if json_text.is_deep(brackets):
        raise _invalid(json_text.TOO_DEEP)
