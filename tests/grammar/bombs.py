"""Grammars that were written to take all memory, or all time: of a parser, of a compiler, or of whoever matches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forebay.requests.sampling_params import Grammar, GrammarKind


def _schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _doubled(word: str, depth: int) -> Any:
    """Each definition has the next one twice."""
    defs = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**defs, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _nested(wrap: Any, depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def bombs() -> Iterator[Grammar]:
    """A hundred."""
    regex, lark = GrammarKind.REGEX, GrammarKind.LARK
    for n in (10, 15, 20, 25, 29):
        yield _schema(_doubled("anyOf", n))
        yield _schema(_doubled("allOf", n))
        yield _schema(_doubled("oneOf", n))
        yield _schema(_nested(lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]}, min(n, 9)))
        yield _schema({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(n)]})
    for n in (100, 1000, 10_000, 100_000, 10**9):
        yield _schema({"type": "string", "minLength": n, "maxLength": 2 * n})
        yield _schema({"type": "array", "minItems": n, "items": {"type": "array", "minItems": n}})
        yield _schema({"type": "object", "minProperties": n, "additionalProperties": {"minProperties": n}})
        yield Grammar(regex, f"(a|b)*a(a|b){{{n}}}")
        yield Grammar(regex, f"((x{{0,{n}}}){{0,{n}}}){{0,{n}}}")
        yield Grammar(regex, rf"\p{{L}}{{{n}}}[^\p{{Lu}}]{{{n}}}")
        yield _schema({"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": n + 7})
    for n in (50, 400, 1500):
        options = [{"properties": {f"k{i}": {"enum": [i]}}, "required": [f"k{i}"]} for i in range(n)]
        yield _schema({"anyOf": options})
        yield _schema({"oneOf": options})
        yield _schema({"allOf": options})
        yield _schema({"properties": {f"k{i}": {"type": "string"} for i in range(n)}})
        yield _schema({"patternProperties": {f"^k{i}.*": {"type": "string"} for i in range(n)}})
        yield _schema({"enum": [f"{'x' * 30}{i}" for i in range(n)]})
        yield Grammar(GrammarKind.CHOICE, json.dumps(["ab" * 20 + str(i) for i in range(min(n, 1024))]))
        yield Grammar(lark, "start: " + " | ".join(f'"{"a" * (i % 90)}" start' for i in range(n)))
        yield Grammar(regex, "|".join(f"(a*b){{{i % 40}}}.*c" for i in range(n)))
        yield Grammar(
            lark, "start: A\nA: " + " & ".join(f"/.*[a-{chr(98 + i % 20)}].{{{i % 30}}}x.*/" for i in range(n))
        )
        yield Grammar(lark, "start: A\nA: " + " & ".join(f"~/.*a.{{{i % 30}}}b/" for i in range(n)))
    yield _schema({"$ref": "#"})
    yield _schema({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})
    yield _schema(_nested(lambda inner: {"items": inner}, 40))
    yield _schema({"title": "x" * 70_000})
    yield Grammar(GrammarKind.JSON_SCHEMA, "[" * 60_000)
    yield Grammar(lark, "start: start start |")
    yield Grammar(lark, "start: (start?)* (start?)*")
    yield Grammar(lark, f'start: %regex {{"substring_chars": {json.dumps("ab" * 30_000)}}}')
    yield Grammar(lark, "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"']))
