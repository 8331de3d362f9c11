"""JSON schemas as libraries write them, in the words that llguidance compiles.

Each rewriting keeps the set of valid values. A keyword that has no equal in those words stays, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

Schema: TypeAlias = Any  # a dict or a bool, if it is one at all

MEMBERS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""
BRANCHES: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
SINGLE: Final = (
    *("items", "additionalItems", "unevaluatedItems"),
    *("propertyNames", "additionalProperties", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
_COUNTS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
_DRAFTS: Final = ("draft-04/schema", "draft-06/schema", "draft-07/schema", "2019-09/schema", "2020-12/schema")
_NOTES: Final = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})
_OF_NAMES: Final = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})


def inside(schema: dict[str, Any], rewrite: Callable[[Schema, str], Schema]) -> dict[str, Any]:
    """Return a schema with each schema that it directly has rewritten, given its place below this one."""

    def of_keyword(key: str, value: Any) -> Any:
        if key in MEMBERS and isinstance(value, dict):
            return {name: rewrite(each, f"{key}/{name}") for name, each in value.items()}
        if key in (*BRANCHES, "items") and isinstance(value, list):
            return [rewrite(each, f"{key}/{i}") for i, each in enumerate(value)]
        return rewrite(value, key) if key in SINGLE else value

    return {key: of_keyword(key, value) for key, value in schema.items()}


def in_known_words(root: Schema) -> Schema:
    """Return the schema in words that llguidance compiles, as far as there are such for it."""

    def rewritten(schema: Schema, _: str = "") -> Schema:
        if not isinstance(schema, dict):
            return schema
        made = inside(schema, rewritten)
        for key in _COUNTS:
            if isinstance(count := made.get(key), float) and count.is_integer():
                made[key] = int(count)
        for key in list(_without_effect(made)):
            del made[key]
        if made.get("not") in ({}, True) and "not" in made:
            return False
        _require_members(made)
        return _with_names(made, _target(made.get("propertyNames"), root))

    return rewritten(root)


def _without_effect(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the keywords of a schema that allow every value, with their values."""
    draft = schema.get("$schema")
    if isinstance(draft, str) and not draft.rstrip("#").endswith(_DRAFTS):
        yield "$schema"
    for key, limit in (("minimum", -sys.float_info.max), ("maximum", sys.float_info.max)):
        if schema.get(key) == limit:
            yield key
    if schema.get("uniqueItems") is False:
        yield "uniqueItems"
    if schema.get("not") is False:
        yield "not"


def _require_members(schema: dict[str, Any]) -> None:
    """Write `required: true` of a property, as drafts 1 to 3 have it, as `required` of the object."""
    properties = schema.get("properties")
    own = properties if isinstance(properties, dict) else {}
    flags = {name: each.get("required") for name, each in own.items() if isinstance(each, dict)}
    flags = {name: flag for name, flag in flags.items() if _is_flag(flag)}
    if not flags:
        return
    schema["properties"] = {**own, **{name: _without(own[name], "required") for name in flags}}
    listed = schema.get("required", [])
    if isinstance(listed, list):
        schema["required"] = list(dict.fromkeys([*listed, *filter(flags.get, flags)]))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_at_least(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _target(schema: Schema, root: Schema) -> Schema:
    """Return the schema, or the definition of `root` that it only refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) and not schema.keys() - _NOTES - {"$ref"} else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return schema if found is None else found


def _with_names(schema: dict[str, Any], names: Schema) -> dict[str, Any]:
    """Return the schema with what `propertyNames` demands said by its properties, if that can be."""
    if "propertyNames" not in schema or not (names is True or isinstance(names, dict)):
        return schema
    demands = {} if names is True else _without(names, *_NOTES)
    others = _without(schema, "propertyNames")
    if not demands or demands == {"type": "string"}:
        return others
    if demands.keys() - _OF_NAMES or demands.get("type", "string") != "string" or "patternProperties" in schema:
        return schema
    return _closed(schema, others, demands) or schema


def _without(schema: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _closed_list(own: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return an object of these properties alone, without a `maxProperties` that it cannot exceed."""
    kept = _without(base, "maxProperties") if _is_at_least(base.get("maxProperties"), len(own)) else base
    return {**kept, "properties": own, "additionalProperties": False}


def _closed(schema: dict[str, Any], base: dict[str, Any], names: dict[str, Any]) -> dict[str, Any] | None:
    """Return an object of these names alone; None if that cannot be said."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(properties, dict):
        return None
    if names.keys() <= {"type", "const"} or names.keys() <= {"type", "enum"}:
        listed = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(listed, list):
            return _closed_list({name: properties.get(name, others) for name in listed if isinstance(name, str)}, base)
    pattern = None if properties else _pattern_of(names)
    return None if pattern is None else {**base, "patternProperties": {pattern: others}, "additionalProperties": False}


def _pattern_of(names: Mapping[str, Any]) -> Any:
    """Return the one pattern of the names that a schema of limits allows; None if it has none."""
    limits = names.keys() - {"type"}
    if limits == {"pattern"}:
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    is_count = limits <= {"minLength", "maxLength"} and all(isinstance(names[limit], int) for limit in limits)
    return rf"^[\s\S]{{{least},{most}}}$" if is_count else None
