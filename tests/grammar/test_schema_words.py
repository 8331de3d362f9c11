"""Schemas that libraries write compile, and each output is valid by the schema as it was written."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLTokenizer

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import compiled
from forebay.grammar.schema_words import BRANCHES, MEMBERS, SINGLE, in_known_words
from forebay.requests.sampling_params import Grammar, GrammarKind

BYTES = LLTokenizer("byte")
FLAG = {"type": "boolean"}
COLOURS = {"$defs": {"Colour": {"type": "string", "title": "Colour", "enum": ["red", "blue"]}}}


def _named(names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": FLAG, "maxProperties": 2, **more}


WRITTEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [  # schema, values that it takes, values that it does not
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
    ({"type": "array", "items": FLAG, "minItems": 1.0, "maxItems": 2.0}, [[True]], [[], [True] * 3]),
    ({"type": "array", "items": {"type": "string", "maxLength": 1.0}, "maxItems": 1}, [["a"]], [["ab"]]),
    ({"type": "array", "items": FLAG, "uniqueItems": False, "maxItems": 2}, [[True, True]], [[1]]),
    ({"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}, [1.5, -3], ["a"]),
    ({"$schema": "http://json-schema.org/schema#", "type": "boolean"}, [True], [1]),
    ({"$schema": "https://example.com/own", "type": "boolean"}, [True], [1]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": FLAG}, "additionalProperties": False}, [{}], [{"a": 1}]),
    ({"type": "boolean", "not": False}, [True], [1]),
    ({"type": "integer", "minimum": 0, "maximum": 3, "exclusiveMinimum": False}, [0], [-1]),
    (_named({"type": "string"}), [{}, {"any name": True}], [{"a": 1}]),
    (_named(True), [{"a": True}], [{"a": 1}]),
    (_named({"description": "A key."}), [{"a": True}], [{"a": 1}]),
    (_named({"type": "string", "enum": ["red", "blue"]}), [{"red": True}], [{"green": True}, {"red": 1}]),
    (_named({"const": "red"}), [{}, {"red": True}], [{"blue": True}]),
    (_named({"$ref": "#/$defs/Colour"}, **COLOURS), [{"blue": True}], [{"green": True}]),
    (_named({"type": "string", "minLength": 1.0, "maxLength": 3}), [{"ab": True}], [{"": True}, {"abcd": True}]),
    (_named({"pattern": "^[a-z]{2}$"}), [{"ab": True}], [{"a": True}, {"AB": True}]),
    (
        _named({"enum": ["a", "b"]}, properties={"a": {"type": "null"}, "c": FLAG}, required=["a"]),
        [{"a": None}, {"a": None, "b": True}],
        [{"a": True}, {"a": None, "c": True}, {}],
    ),
    (
        {"type": "object", "properties": {"minLength": {"type": "string", "maxLength": 1.0}}},
        [{"minLength": "a"}],
        [{"minLength": "ab"}],
    ),
]


def _takes(schema: Any, value: Any) -> bool:
    matcher = compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), BYTES)
    tokens = list(json.dumps(value).encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def _sampled(schema: Any, seed: int) -> Any:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))
    matcher, rng, out = compiled(grammar, BYTES), random.Random(seed), bytearray()
    while len(out) < 100:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> (token % 8) & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            return json.loads(out)
        out.append(ord('"') if ord('"') in allowed and rng.random() < 0.4 else rng.choice(allowed))
        assert matcher.consume_token(out[-1])
    return None


@pytest.mark.parametrize(("schema", "takes", "refuses"), WRITTEN)
def test_schema_in_other_words_takes_the_values_of_the_schema_as_written(
    schema: dict[str, Any], takes: list[Any], refuses: list[Any]
) -> None:
    valid = jsonschema_rs.Draft202012Validator(
        {k: v for k, v in schema.items() if k not in ("$schema", "exclusiveMinimum")}
    )
    assert (
        [_takes(schema, value) for value in takes] == [valid.is_valid(value) for value in takes] == [True] * len(takes)
    )
    assert [_takes(schema, value) for value in refuses] == [False] * len(refuses)
    assert not any(map(valid.is_valid, refuses))
    outputs = [_sampled(schema, seed) for seed in range(10)]
    assert all(valid.is_valid(output) for output in outputs if output is not None)


def test_required_flag_of_a_property_is_required_of_its_object() -> None:
    schema = {"type": "object", "properties": {"a": {**FLAG, "required": True}, "b": {**FLAG, "required": False}}}
    assert not _takes(schema, {})
    assert _takes(schema, {"a": True})
    nested = {"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}, "required": ["a"]}
    assert in_known_words(nested) == nested


@pytest.mark.parametrize(
    "schema",
    [
        _named({"type": "string", "format": "uuid"}),
        _named({"pattern": "^a"}, properties={"a": FLAG}),
        _named({"pattern": "^a"}, patternProperties={"^b": FLAG}),
        _named({"pattern": "^a", "maxLength": 3}),
        _named({"anyOf": [{"const": "a"}]}),
        _named({"type": "integer"}),
        _named(False),
        _named({"maxLength": "x"}),
        _named({"$ref": "#/$defs/Colour", "maxLength": 3}, **COLOURS),
        _named({"$ref": "#/$defs/Missing"}),
        _named("text"),
        {"type": "string", "minLength": 1.5},
        {"not": {"type": "null"}},
        {"type": "array", "uniqueItems": True},
        {"type": "any"},
        {"minLength": "1"},
    ],
)
def test_keyword_without_an_equal_is_kept_and_refused(schema: Any) -> None:
    assert in_known_words(schema) == schema
    with pytest.raises(InvalidRequest) as caught:
        compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), BYTES)
    assert caught.value.code == "grammar_invalid"


def test_values_that_are_no_schemas_keep_their_numbers() -> None:
    schema = {"const": {"minLength": 1.0, "not": {}}, "default": {"uniqueItems": False}, "enum": [{"required": True}]}
    assert json.dumps(in_known_words(schema)) == json.dumps(schema)


@pytest.mark.parametrize("key", [*MEMBERS, *BRANCHES, *SINGLE])
def test_schema_is_rewritten_at_each_place_that_has_schemas_and_nowhere_else(key: str) -> None:
    written = {"minLength": 1.0, "pattern": "x"}
    schema: dict[str, Any] = {key: {"a": written} if key in MEMBERS else [written] if key in BRANCHES else written}
    assert json.dumps(in_known_words(schema)) == json.dumps(schema).replace("1.0", "1")
    values = {"enum": [written], "const": written, "examples": [written]}
    assert json.dumps(in_known_words(values)) == json.dumps(values)


def test_items_that_are_a_list_are_schemas() -> None:
    assert json.dumps(in_known_words({"items": [{"maxLength": 2.0}, True]})) == '{"items": [{"maxLength": 2}, true]}'
