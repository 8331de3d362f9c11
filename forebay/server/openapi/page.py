"""/docs: the OpenAPI document as a page to read. It is made here and loads nothing but the server's own styles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from typing import Any, Final

from markdown_it import MarkdownIt

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>{title}</title>
  <link rel="icon" href="console/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="console/base.css">
  <link rel="stylesheet" href="console/docs.css">
</head>
<body class="docs">
<main>
{body}
</main>
</body>
</html>
"""
# Of the bounds that a schema may have: the least and the most, and of what.
_BOUNDS: Final = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " entries"),
    ("minProperties", "maxProperties", " entries"),
)
_LARGE: Final = 1 << 20  # most from there on are only there so that there is one


def html(document: Mapping[str, Any]) -> str:
    """The whole page."""
    text = f"# Forebay {document['info']['version']}: the API\n\n{_INTRODUCTION}\n\n{markdown(document)}"
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    for opening, inside in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", anchor(inside.content))
    body = reader.renderer.render(tokens, reader.options, {})
    return _PAGE.format(title=escape("Forebay: the API"), body=body)


_INTRODUCTION: Final = (
    "Keys come as `Authorization: Bearer KEY` or as `x-api-key: KEY`. The same as JSON for programs: "
    "[/openapi.json](openapi.json)."
)


def markdown(document: Mapping[str, Any]) -> str:
    """Routes, then the types that they name."""
    routes = [
        _route(method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = document["components"]["schemas"]
    types = [_type(name, schema) for name, schema in sorted(schemas.items()) if "properties" in schema]
    return "\n\n".join(["## Routes", *routes, "## Types", *types])


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as Markdown renderers make it."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "-_ ")
    return kept.strip().replace(" ", "-")


def _route(method: str, path: str, operation: Mapping[str, Any]) -> str:
    lines = [f"### {method} {path}", operation["summary"]]
    if "requestBody" in operation:
        lines.append(f"Body: {_media(operation['requestBody'])}")
    answers = (f"{_media(answer)} ({status})" for status, answer in operation["responses"].items())
    lines.append(f"Answer: {'; '.join(answers)}.")
    return "\n\n".join(lines)


def _media(holder: Mapping[str, Any]) -> str:
    of = {media: _kind(found["schema"]) for media, found in holder["content"].items()}
    return ", or ".join(kind if media == "application/json" else f"`{media}`" for media, kind in of.items())


def _type(name: str, schema: Mapping[str, Any]) -> str:
    marks = dict.fromkeys(schema.get("required", ()), r" \*")
    rows = [
        f"| `{field}`{marks.get(field, '')} | {_cell(_kind(found))} | {_cell(_about(found))} |"
        for field, found in sorted(schema["properties"].items(), key=lambda item: _order(item[0], marks))
    ]
    about = [" ".join(schema["description"].split())] if "description" in schema else []
    return "\n\n".join(
        [f"### {name}", *about, "\n".join(["| field (\\* required) | type | what it says |", "|---|---|---|", *rows])]
    )


def _order(field: str, required: Mapping[str, str]) -> int:
    """Sort key of fields: required ones first, those of gateways last."""
    return 2 if field.startswith("bootstrap_") else field not in required


def _about(found: Mapping[str, Any]) -> str:
    default = found.get("default")
    known = f" Default `{json.dumps(default)}`." if default not in (None, {}) else ""
    return str(found.get("description", "")) + known


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe the type of a schema's value, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{anchor(name)})"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema.get("anyOf") or schema["oneOf"])))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    return _plain_kind(schema)


def _plain_kind(schema: Mapping[str, Any]) -> str:
    """Describe a type with its contents and bounds."""
    kinds = schema.get("type", "anything")
    word = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if word == "array":
        inside = schema.get("items") or {}
        word = f"list of {_kind(inside)}" if inside else "list"
    if word == "object" and isinstance(schema.get("additionalProperties"), dict):
        word = f"object of {_kind(schema['additionalProperties'])}"
    bounds = "; ".join(_bounds(schema))
    return f"{word} ({bounds})" if bounds else word


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']:g}"
    for least, most, unit in _BOUNDS:
        low, high = schema.get(least, -_LARGE), schema.get(most, _LARGE)
        is_least, is_most = low > -_LARGE and not (low == 1 and unit), high < _LARGE
        if is_least or is_most:
            yield _range(f"{low:g}" if is_least else "", f"{high:g}" if is_most else "") + unit
    if "pattern" in schema:
        yield f"matching `{schema['pattern']}`"


def _range(low: str, high: str) -> str:
    if low and high:
        return f"{low} to {high}"
    return f"at least {low}" if low else f"at most {high}"
