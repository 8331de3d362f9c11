"""`oneOf` as `anyOf`, if no value is valid by two of its branches.

A grammar can offer alternatives, but cannot exclude what two of them have in common. If the branches are disjoint, both
keywords have the same meaning. Everything here is a proof: branches that are not shown to be disjoint count as
overlapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Final

from forebay.grammar.schema_words import Schema, inside

MAX_LOOKS: Final = 20_000  # at schemas and values, for all proofs of a grammar: about 20 ms
MAX_DEPTH: Final = 8  # of properties and references in one proof
_TYPES: Final = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_NUMBER: Final = frozenset({"integer", "fraction"})
_BOUNDS: Final = {
    "integer": ("minimum", "maximum"),
    "fraction": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def one_of_as_any_of(schema: Schema) -> tuple[Schema, str]:
    """Return the schema with `anyOf` for each `oneOf` of disjoint branches, and why the first other one stays."""
    if "oneOf" not in str(schema):
        return schema, ""
    rewriting = _Rewriting(schema)
    return rewriting.rewritten(schema, "#"), rewriting.overlap


class _Rewriting:
    def __init__(self, root: Schema) -> None:
        self._proof = _Proof(root)
        self.overlap = ""

    def rewritten(self, schema: Schema, path: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        made = inside(schema, lambda each, place: self.rewritten(each, f"{path}/{place}"))
        branches = schema.get("oneOf")
        if isinstance(branches, list) and self._are_disjoint(schema, branches, path):
            options = {"anyOf": made.pop("oneOf")}
            made = {**made, "allOf": [*made.get("allOf", ()), options]} if "anyOf" in made else {**made, **options}
        return made

    def _are_disjoint(self, schema: dict[str, Any], branches: Sequence[Schema], path: str) -> bool:
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        for (i, one), (j, other) in combinations(enumerate(branches), 2):
            if not self._proof.is_empty([beside, one, other]):
                self.overlap = self.overlap or (
                    f"branches {i} and {j} of the oneOf at {path[:200]} may be valid for the same value: make them "
                    "exclude each other by type, by const or enum, or by a required property, or use anyOf"
                )
                return False
        return True


def _named_types(named: Any) -> set[str]:
    """Return the types that a schema's `type` names; all if it names none, or one that is unknown."""
    names = named if isinstance(named, list) else [named]
    if not all(name in _TYPES or name == "number" for name in names):
        return set(_TYPES)
    return {kind for name in names for kind in (_NUMBER if name == "number" else {name})}


class _Proof:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._looks_left = MAX_LOOKS

    def is_empty(self, schemas: Sequence[Schema], depth: int = 0) -> bool:
        """Return whether it is shown that no value is valid by all of the schemas."""
        found = self._flat(schemas)
        self._looks_left -= len(found)
        if depth > MAX_DEPTH or self._looks_left < 0:
            return False
        if any(schema is False for schema in found):
            return True
        parts = [schema for schema in found if isinstance(schema, dict)]
        return self._has_no_type(parts, depth) or any(
            self._has_no_option(parts, i, word, depth) for i in range(len(parts)) for word in ("anyOf", "oneOf")
        )

    def _has_no_type(self, parts: Sequence[dict[str, Any]], depth: int) -> bool:
        """Return whether it is shown of each type that no value of it is valid by all parts."""
        return all(
            _out_of_bounds(parts, kind) or (kind == "object" and self._no_object(parts, depth))
            for kind in self._types(parts)
        )

    def _has_no_option(self, parts: list[dict[str, Any]], i: int, word: str, depth: int) -> bool:
        """Return whether it is shown that each option of one part's `anyOf` or `oneOf` is empty with the others."""
        options = parts[i].get(word)
        if not isinstance(options, list) or not options:
            return False
        return all(
            self.is_empty([*parts[:i], {**parts[i], word: None}, option, *parts[i + 1 :]], depth + 1)
            for option in options
        )

    def _flat(self, schemas: Sequence[Schema]) -> list[Schema]:
        """Return the schemas with those that they refer to and those in their `allOf`."""
        found, waiting = list[Schema](), list(schemas)
        while waiting and len(found) < 100:
            schema = waiting.pop()
            found.append(schema)
            if isinstance(schema, dict):
                waiting += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
                waiting += self._target(schema.get("$ref"))
        return found

    def _target(self, reference: Any) -> list[Schema]:
        """Return the schema that a reference within the document names; nothing for others, which only widens."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return []
        target = self._root
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                return []
            target = target[name]
        return [target]

    def _types(self, parts: Sequence[dict[str, Any]]) -> set[str]:
        """Return the types of the values that the schemas' `type`, `const` and `enum` leave."""
        types = set(_TYPES)
        for part in parts:
            types &= _named_types(part.get("type"))
        listed = [values for part in parts for values in _listed(part)]
        if listed:
            self._looks_left -= sum(map(len, listed))
            common = set.intersection(*({_canonical(value) for value in values} for values in listed))
            types &= {_type_of(value) for value in listed[0] if _canonical(value) in common}
        return types

    def _no_object(self, parts: Sequence[dict[str, Any]], depth: int) -> bool:
        required = {name for part in parts for name in _names(part.get("required"))}
        return any(self.is_empty([s for part in parts for s in _of_member(part, name)], depth + 1) for name in required)


def _listed(part: dict[str, Any]) -> Iterator[list[Any]]:
    if "const" in part:
        yield [part["const"]]
    if isinstance(part.get("enum"), list):
        yield part["enum"]


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _of_member(part: dict[str, Any], name: str) -> list[Schema]:
    """Return the schemas that the member must be valid by, as far as they are certain."""
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return [properties[name]]
    others = part.get("additionalProperties", True)
    return [] if part.get("patternProperties") else [others]


def _out_of_bounds(parts: Sequence[dict[str, Any]], kind: str) -> bool:
    if kind not in _BOUNDS:
        return False
    low, high = _BOUNDS[kind]
    lows, highs = ([part[word] for part in parts if _is_number(part.get(word))] for word in (low, high))
    return bool(lows and highs) and bool(max(lows) > min(highs))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == value // 1 else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _canonical(value: Any) -> Any:
    """Return a key that is equal for values that are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    match value:
        case list():
            return ("array", *map(_canonical, value))
        case dict():
            return ("object", *sorted((key, _canonical(each)) for key, each in value.items()))
        case bool() | None:
            return ("name", str(value))
        case _:
            return value
