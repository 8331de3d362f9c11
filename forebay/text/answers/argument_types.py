"""Types of a tool's arguments, as far as its JSON schema states them. Nothing here assumes that the schema is valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_MAX_DEPTH: Final = 16  # of references and alternatives; a schema may refer to itself
_TEXT_WORDS: Final = frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"})
_TYPES: Final = {
    "integer": "number",
    **{name: name for name in ("string", "null", "boolean", "object", "array", "number")},
}
_ALTERNATIVES: Final = ("anyOf", "oneOf")


class ArgumentType(NamedTuple):
    """`text`: the schema takes strings and nothing else, except null if `nullable`."""

    text: bool = False
    nullable: bool = False


def argument_type(tool: Any, argument: str) -> ArgumentType:
    """Return what the schema `tool` of a tool's parameters says of one argument."""
    types = types_of(tool, argument)
    return ArgumentType("string" in types and types <= {"string", "null"}, "null" in types)


def types_of(tool: Any, argument: str) -> frozenset[str]:
    """Return the JSON types that the tool takes as one argument (`number` for integers); none if it does not say."""
    return _types({"anyOf": list(_of_argument(tool, tool, argument, 0))}, tool, 0)


def is_text(tool: Any, argument: str) -> bool:
    """Return whether the tool takes strings there, and nothing else but null."""
    return argument_type(tool, argument).text


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that `schema` refers to within `root`, or `schema` if it refers to nothing that exists."""
    seen = 0
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and seen < _MAX_DEPTH:
        found = _at(root, reference)
        if found is None:
            return schema
        schema, seen = found, seen + 1
    return schema


def subschemas(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and its alternatives and parts, references resolved."""
    yield from _subschemas(schema, root, 0)


def texts_of(schema: Any, root: Any) -> list[str] | None:
    """Return the strings that a schema lists (`const`, `enum`); None if it takes any string."""
    return _texts(schema, root, 0)


def _subschemas(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return
    yield schema
    for word in ("allOf", *_ALTERNATIVES):
        for each in _listed(schema, word):
            yield from _subschemas(each, root, depth + 1)


def _at(root: Any, reference: str) -> Any:
    """Return what a JSON pointer in a fragment names; None if nothing is there."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _of_argument(schema: Any, root: Any, argument: str, depth: int) -> Iterator[Any]:
    """Yield the schemas that an argument has in the parts of a tool's schema."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return
    properties = schema.get("properties")
    if isinstance(properties, dict) and argument in properties:
        yield properties[argument]
    elif isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]
    for word in ("allOf", *_ALTERNATIVES):
        for each in _listed(schema, word):
            yield from _of_argument(each, root, argument, depth + 1)


def _types_of_any(alternatives: list[Any], root: Any, depth: int) -> frozenset[str]:
    """Return the types of all alternatives; empty if one does not say."""
    options = [_types(each, root, depth + 1) for each in alternatives]
    return frozenset[str]().union(*options) if all(options) else frozenset()


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """Return the JSON types that a schema takes; empty if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    said = [_named(schema.get("type")), _of_values(_choices(schema))]
    said += [_types(each, root, depth + 1) for each in _listed(schema, "allOf")]
    said += [_types_of_any(_listed(schema, word), root, depth) for word in _ALTERNATIVES]
    known = [types for types in said if types]
    found = frozenset.intersection(*known) if known else frozenset()
    if not known and not schema.keys().isdisjoint(_TEXT_WORDS):
        found = frozenset({"string"})
    return found | {"null"} if found and schema.get("nullable") is True else found


def _named(names: Any) -> frozenset[str]:
    listed = names if isinstance(names, list) else [names]
    known = [_TYPES.get(name) if isinstance(name, str) else None for name in listed]
    return frozenset(name for name in known if name) if all(known) else frozenset()


def _of_values(values: Sequence[Any]) -> frozenset[str]:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return frozenset(kinds.get(type(value), "null") for value in values)


def _texts_of_any(alternatives: list[Any], root: Any, depth: int) -> list[str] | None:
    """Return the texts of all alternatives that take a text; None without one, or if one takes any text."""
    taking = [each for each in alternatives if "string" in (_types(each, root, depth + 1) or {"string"})]
    options = [_texts(each, root, depth + 1) for each in taking]
    if not options or None in options:
        return None
    return [text for option in options for text in option or ()]


def _texts(schema: Any, root: Any, depth: int) -> list[str] | None:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    choices = _choices(schema)
    said = [[each for each in choices if isinstance(each, str)] if choices else None]
    said += [_texts(each, root, depth + 1) for each in _listed(schema, "allOf")]
    said += [_texts_of_any(_listed(schema, word), root, depth) for word in _ALTERNATIVES]
    return _common([texts for texts in said if texts is not None])


def _common(lists: Sequence[list[str]]) -> list[str] | None:
    """Return the texts that are in all lists, once each, in the order of the first; None without a list."""
    return [text for text in dict.fromkeys(lists[0]) if all(text in each for each in lists[1:])] if lists else None


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _listed(schema, "enum")


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
