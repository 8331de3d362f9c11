"""Messages about wrong bodies, in our words and with the client's own names.

pydantic says which class of ours it did not find and spells a union's branches into the location. A client knows fields
and indices only."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final, Literal, get_args

from pydantic import Discriminator
from pydantic_core import PydanticCustomError

from forebay.base.errors import InvalidRequest

UNSUPPORTED_FIELD: Final = "unsupported_field"
INVALID_COMBINATION: Final = "invalid_combination"
INVALID_VALUE: Final = "invalid_value"
MISSING_FIELD: Final = "missing_field"
UNKNOWN_FIELD: Final = "unknown_field"
CHAT_TEMPLATE_REFUSED: Final = "chat_template_refused"

OwnCode = Literal[
    "unsupported_field",
    "invalid_combination",
    "invalid_value",
    "missing_field",
    "unknown_field",
    "chat_template_refused",
]
_OWN_CODES: Final = frozenset(get_args(OwnCode))
DECIMAL_ID: Final = r"^(0|[1-9][0-9]{0,9})$"  # a key that is a token id
_MAX_NAME_CHARS: Final = 64
_LARGEST_SHOWN: Final = 1e15
_WORDS: Final = {
    "string_type": "must be a string",
    "string_unicode": "is not valid Unicode text",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "is empty: it must have at least {min_length} character",
    "string_pattern_mismatch": "must match {pattern}",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_long": "has {actual_length} entries: at most {max_length} are allowed",
    "too_short": "is empty: it must have at least {min_length} entry",
}


def refusal(code: OwnCode, param: str, message: str) -> PydanticCustomError:
    """To raise in a validator: the field `param` of the validated object, with one of the codes above."""
    return PydanticCustomError(code, "{text}", {"text": message, "param": param})


def by_shape(choose: Callable[[Any], str | None], wanted: str) -> Discriminator:
    """Return a discriminator that chooses a union's branch (`Tag`s made by `branch`) by the shape of the input, so that
    only the intended branch reports errors. If `choose` returns None, the message is "must be `wanted`"."""
    return Discriminator(choose, custom_error_type=INVALID_VALUE, custom_error_message=f"must be {wanted}")


def branch(name: str) -> str:
    """A tag that no field can be called, so that locations can be freed from it."""
    return f"<{name}>"


def validation_error(
    details: list[dict[str, Any]], names: frozenset[str], fields: list[str], body: Any
) -> InvalidRequest:
    """The first complaint, unknown fields before others.

    `details` are pydantic's, with contexts and inputs. `names` are the fields of every type that may be nested in the
    `body`, `fields` those of the body itself, for a did-you-mean.
    """
    first = next((item for item in details if item["type"] == UNKNOWN_FIELD), details[0])
    kind, context = first["type"], first.get("ctx", {})
    parts = [part for part in first["loc"] if isinstance(part, int) or part in names]
    if kind == UNKNOWN_FIELD:
        return _unknown(parts, context["param"][:_MAX_NAME_CHARS], [] if parts else fields, context["text"])
    if "param" in context:
        param = _join([*parts, context["param"]])
        text = _join([*parts, ""]) + context["text"]
        return InvalidRequest(text, code=kind, param=param)
    return _pydantic_error(first, _join(parts), details, names, body)


def _pydantic_error(
    first: dict[str, Any], param: str, details: list[dict[str, Any]], names: frozenset[str], body: Any
) -> InvalidRequest:
    """Return pydantic's own complaint about the field `param`, in the words of this server."""
    kind = first["type"]
    if kind == "missing":
        return InvalidRequest(f"{param} is missing", code=MISSING_FIELD, param=param)
    entry = _entry(first["loc"], names, body)
    if kind in _OWN_CODES:
        return InvalidRequest(f"{param}{entry} {first['msg']}", param=param)
    branches = [item for item in details if item["input"] is first["input"] and _at(item["loc"]) == _at(first["loc"])]
    return InvalidRequest(f"{param}{entry} {_words_of_union(branches)}", param=param)


def _at(loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a location without its last part if that may be the branch of a union."""
    return loc[:-1] if isinstance(loc[-1], str) else loc


def _unknown(parts: list[Any], name: str, fields: list[str], why: str) -> InvalidRequest:
    """Return the error about an unknown field; `why` is the line about a field that other engines have."""
    near = get_close_matches(name, fields, n=1)
    param = _join([*parts, name])
    hint = why or (f"did you mean {near[0]}?" if near else "")
    return InvalidRequest(f"unknown field {param!a}" + (f": {hint}" if hint else ""), code=UNKNOWN_FIELD, param=param)


def _words(kind: str, context: dict[str, Any], value: Any) -> str:
    words = _WORDS.get(kind, "has a value that is not allowed").format_map(context)
    if context.get("pattern") == DECIMAL_ID:
        words = "must be a token id in decimal digits"
    if type(value) in (int, float) and abs(value) < _LARGEST_SHOWN:
        words += f", not {value}"
    return words


def _words_of_union(branches: list[dict[str, Any]]) -> str:
    """Return what every branch of a union wants if each wants a type, else what the first wants."""
    texts = [_WORDS.get(item["type"], "") for item in branches]
    value = branches[0]["input"]
    if len(branches) > 1 and all(text.startswith("must be ") and "{" not in text for text in texts):
        kinds = list(dict.fromkeys(text.removeprefix("must be ") for text in texts))
        shown = f", not {value}" if type(value) in (int, float) and abs(value) < _LARGEST_SHOWN else ""
        return f"must be {', '.join(kinds[:-1])} or {kinds[-1]}{shown}" if kinds[1:] else f"must be {kinds[0]}{shown}"
    return _words(branches[0]["type"], branches[0].get("ctx", {}), value)


def _entry(loc: tuple[Any, ...], names: frozenset[str], body: Any) -> str:
    """The key of an object whose keys are the client's, as `['5']`. What the `body` does not have at that place is the
    name of a branch, which pydantic adds."""
    keys, at = [], body
    for part in loc:
        if isinstance(at, dict) and part in at:
            keys += [part] if isinstance(part, str) and part not in names else []
            at = at[part]
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
    return "".join(f"[{key[:_MAX_NAME_CHARS]!a}]" for key in keys)


def _join(parts: list[Any]) -> str:
    return ".".join(map(str, parts))
