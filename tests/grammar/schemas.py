"""Two hundred JSON schemas, of the kinds that the public suite for JSON schemas has: each of them ten times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("a", "name", "é", "with space", 'qu"ote', "back\\slash", "日本", "🙂", "$ref", "0", "items")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "uri", "hostname", "ipv6", "duration", "date")
_PATTERNS = ("^[a-c]{1,4}$", "^x+y$", "^(ab|cd)*$", r"^\d{3}-\d{2}$", "^[^x]{2}$", "^é?z$", "^(a|b(c|d)){1,3}$")


def _object(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def _small(rng: Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"enum": rng.sample([1, "x", None, True, "é", 2.5, [1], {"a": 1}], 3)},
        ]
    )


def _names(rng: Random, count: int) -> list[str]:
    return rng.sample(_WORDS, count)


def _types(rng: Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", "integer"])}  # an exponent of a number without bounds may be any


def _type_lists(rng: Random) -> Schema:
    return {"type": rng.sample(["boolean", "null", "integer"], 2)}


def _enums(rng: Random) -> Schema:
    return {"enum": rng.sample([0, -1, 1.5, True, None, "", "é", "日本\n", [1, "a"], {"k": [None]}], rng.randint(1, 6))}


def _constants(rng: Random) -> Schema:
    return _object({name: {"const": rng.choice([1, "é", None, [1, 2], {"a": {}}])} for name in _names(rng, 2)})


def _nested(rng: Random) -> Schema:
    inner = _small(rng)
    for name in _names(rng, rng.randint(1, 5)):
        inner = _object({name: inner})
    return inner


def _optional(rng: Random) -> Schema:
    names = _names(rng, 4)
    return _object({name: _small(rng) for name in names}, required=names[:: rng.randint(1, 3)])


def _arrays(rng: Random) -> Schema:
    low = rng.randint(0, 3)
    return {"type": "array", "items": _small(rng), "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _tuples(rng: Random) -> Schema:
    first = [_small(rng) for _ in range(rng.randint(1, 3))]
    return {
        "type": "array",
        "prefixItems": first,
        "minItems": len(first),
        "items": rng.choice([False, {"const": 1}]),
    } | {"maxItems": len(first) + 1}


def _lengths(rng: Random) -> Schema:
    low = rng.randint(0, 5)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _patterns(rng: Random) -> Schema:
    return _object({"at": {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 30}})


def _formats(rng: Random) -> Schema:
    return _object({"at": {"type": "string", "format": rng.choice(_FORMATS)}})


def _any_of(rng: Random) -> Schema:
    return {"anyOf": [_small(rng), _object({"kind": {"const": "b"}, "value": _small(rng)}), {"type": "boolean"}]}


def _one_of(rng: Random) -> Schema:
    return {"oneOf": [_object({"kind": {"const": kind}, kind: _small(rng)}) for kind in ("a", "b", "c")]}


def _all_of(rng: Random) -> Schema:
    low = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(5, 90)}, {"type": "number"}]}


def _references(rng: Random) -> Schema:
    return _object({"one": {"$ref": "#/$defs/it"}, "two": {"$ref": "#/$defs/it"}}) | {"$defs": {"it": _small(rng)}}


def _recursion(rng: Random) -> Schema:
    tree = _object(
        {"value": _small(rng), "under": {"type": "array", "items": {"$ref": "#/definitions/t"}, "maxItems": 1}}
    )
    return {"definitions": {"t": tree}, "$ref": "#/definitions/t"}


def _maps(rng: Random) -> Schema:
    return {"type": "object", "additionalProperties": _small(rng), "minProperties": 0, "maxProperties": 1}


def _named_by_pattern(rng: Random) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^n[0-9]$": _small(rng)},
        "additionalProperties": False,
        "maxProperties": 1,
    }


def _integers(rng: Random) -> Schema:
    low = rng.choice([-1000, -7, 0, 3])
    bounds = rng.choice([{"minimum": low, "maximum": low + 99}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 5}])
    return {"type": "integer", **bounds, **({"multipleOf": 2} if rng.random() < 0.3 else {})}


def _numbers(rng: Random) -> Schema:
    low = rng.choice([-2.5, 0, 0.001, 10])
    return {
        "type": "number",
        "minimum": low,
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.choice([0.5, 1, 1000]),
    }


KINDS: tuple[Callable[[Random], Schema], ...] = (
    *(_types, _type_lists, _enums, _constants, _nested, _optional, _arrays, _tuples, _lengths, _patterns),
    *(_formats, _any_of, _one_of, _all_of, _references, _recursion, _maps, _named_by_pattern, _integers, _numbers),
)


def schemas() -> list[Schema]:
    """Without white space, so that outputs are short."""
    made = [kind(Random(f"{kind.__name__} {i}")) for i in range(10) for kind in KINDS]
    return [{**schema, "x-guidance": {"whitespace_flexible": False}} for schema in made]
