"""`oneOf` is compiled if its branches are disjoint; no accepted output is valid by two of them."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLTokenizer

from forebay.base.errors import InvalidRequest
from forebay.grammar import one_of
from forebay.grammar.compiler import compiled
from forebay.grammar.one_of import one_of_as_any_of
from forebay.requests.sampling_params import Grammar, GrammarKind

BYTES = LLTokenizer("byte")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def _tagged(tag: Any, **more: Any) -> dict[str, Any]:
    properties = {"kind": tag, **more}
    return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}


CAT, DOG = (_tagged({"const": name, "type": "string"}, age={"type": "integer"}) for name in ("cat", "dog"))
PETS = {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}}}
DEFS = {"$defs": {"Cat": CAT, "Dog": DOG, "Id": {"type": "integer", "minimum": 0}}}
CLOSED = {"type": "object", "additionalProperties": False}
ONE = {"type": "integer", "const": 1}
DISJOINT = [
    ([{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], {**DEFS, **PETS}),
    ([_tagged({"enum": [1, "a"]}), _tagged({"enum": [2, True]}), _tagged({"const": 1.5})], {}),
    ([{"const": 1, "title": "x"}, {"const": 2}, {"const": True}, {"const": "1"}, {"const": [1]}], {}),
    ([{"type": "integer"}, {"type": ["string", "null"]}, {"type": "array", "maxItems": 1, "items": ONE}], {}),
    ([{"type": "integer", "minimum": 1, "maximum": 3}, {"type": "integer", "minimum": 4, "maximum": 9}], {}),
    ([{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3, "maxLength": 5}], {}),
    (
        [
            {**CLOSED, "properties": {"a": ONE}, "required": ["a"]},
            {**CLOSED, "properties": {"b": ONE}, "required": ["b"]},
        ],
        {},
    ),
    ([{"allOf": [{"$ref": "#/$defs/Id"}, {"maximum": 5}]}, {"type": "null"}], DEFS),
    ([{"anyOf": [{"const": "x"}, {"type": "null"}]}, {"enum": ["y", 1]}, {"type": "boolean"}], {}),
    ([{"properties": {"kind": {"const": i}}, "required": ["kind"], **CLOSED} for i in range(8)], {"type": "object"}),
]
OVERLAPPING = [
    ([{"type": "integer"}, {"type": "number"}], {}),
    ([{"const": 1}, {"const": 1.0}], {}),
    ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], {}),
    ([{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}], {"type": "object"}),
    ([{"required": ["a"]}, {"required": ["b"]}], {"type": "object", "properties": {"a": ONE, "b": ONE}}),
    ([{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}], {}),
    ([{"type": "null"}, {"not": {"type": "null"}}], {}),
    ([True, {"type": "null"}], {}),
]


def _grammar(branches: list[Any], more: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"oneOf": branches, **more, **COMPACT}))


def _sampled(grammar: Grammar, seed: int) -> Any:
    matcher, rng, out = compiled(grammar, BYTES), random.Random(seed), bytearray()
    while len(out) < 200:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> (token % 8) & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            return json.loads(out)
        out.append(ord('"') if ord('"') in allowed and rng.random() < 0.4 else rng.choice(allowed))
        assert matcher.consume_token(out[-1])
    return None


@pytest.mark.parametrize(("branches", "more"), DISJOINT)
def test_one_of_disjoint_branches_compiles_and_each_output_is_valid_by_one(branches: list[Any], more: Any) -> None:
    schema = {"oneOf": branches, **more}
    valid = jsonschema_rs.Draft202012Validator(schema)
    outputs = [_sampled(_grammar(branches, more), seed) for seed in range(25)]
    assert all(valid.is_valid(output) for output in outputs if output is not None)
    of_branch = [jsonschema_rs.Draft202012Validator({**more, **branch}) for branch in branches]
    assert len({i for i, each in enumerate(of_branch) if any(map(each.is_valid, outputs))}) > 1
    assert one_of_as_any_of(schema)[1] == ""


@pytest.mark.parametrize(("branches", "more"), OVERLAPPING)
def test_one_of_branches_that_may_overlap_is_refused_with_their_numbers(branches: list[Any], more: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(_grammar(branches, more), BYTES)
    assert caught.value.code == "grammar_invalid"
    if "not" not in json.dumps(branches):
        assert "branches 0 and 1 of the oneOf at # " in caught.value.message


def test_one_of_random_branches_that_compile_accept_no_value_twice() -> None:
    """Every pair of schemas that is shown to be disjoint is so for every value at hand."""
    values = [None, True, False, 0, 1, 1.0, 1.5, -3, "", "a", "abc", [], [1], [1, "a"], {}, {"a": 1}, {"a": "a"}]
    values += [{"b": 1}, {"a": 1, "b": None}, {"a": None}, {"c": [1]}, {"a": {"a": 1}}]
    rng, num_shown = random.Random(7), 0
    for _ in range(1500):
        one, other = _random_schema(rng, 2), _random_schema(rng, 2)
        if one_of_as_any_of({"oneOf": [one, other]})[1]:
            continue
        num_shown += 1
        valid = [jsonschema_rs.Draft202012Validator(schema) for schema in (one, other)]
        assert not any(all(each.is_valid(value) for each in valid) for value in values), (one, other)
    assert 200 < num_shown < 1400


def _random_schema(rng: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {}
    if rng.random() < 0.6:
        made["type"] = rng.choice(["integer", "number", "string", "null", "boolean", "array", "object"])
    if rng.random() < 0.3:
        made["enum"] = rng.sample([None, 0, 1, 1.0, True, "a", "", [1], {"a": 1}, {}], 3)
    if rng.random() < 0.2:
        made |= {"minimum": rng.randint(-2, 2), "maxLength": rng.randint(0, 2), "minItems": rng.randint(0, 1)}
    if rng.random() < 0.2:
        made |= {"maximum": rng.randint(-2, 2), "minLength": rng.randint(0, 2), "maxItems": rng.randint(0, 1)}
    if depth and rng.random() < 0.5:
        names = rng.sample(["a", "b", "c"], 2)
        made["properties"] = {name: _random_schema(rng, depth - 1) for name in names}
        made["required"] = names[: rng.randint(0, 2)]
        if rng.random() < 0.5:
            made["additionalProperties"] = False
    if depth and rng.random() < 0.3:
        made[rng.choice(["anyOf", "allOf"])] = [_random_schema(rng, depth - 1) for _ in range(2)]
    return made


def test_one_of_deeper_and_beside_any_of_is_rewritten_where_it_is_a_schema() -> None:
    disjoint = [{"type": "null"}, {"type": "integer"}]
    schema = {"properties": {"oneOf": {"oneOf": disjoint, "anyOf": [{"minimum": 1}]}}, "const": {"oneOf": disjoint}}
    assert one_of_as_any_of(schema)[0] == {
        "properties": {"oneOf": {"anyOf": [{"minimum": 1}], "allOf": [{"anyOf": disjoint}]}},
        "const": {"oneOf": disjoint},
    }


def test_one_of_proof_with_many_branches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    flat = one_of._Proof._flat
    monkeypatch.setattr(one_of._Proof, "_flat", lambda *args: looks.append(1) or flat(*args))
    branches = [_tagged({"const": i}) for i in range(1500)]
    assert one_of_as_any_of({"oneOf": branches})[1]
    assert len(looks) < one_of.MAX_LOOKS
    assert not one_of_as_any_of({"oneOf": branches[:60]})[1]
    assert len(list(combinations(range(60), 2))) > 1000


def test_one_of_error_is_that_of_the_library_if_the_branches_are_disjoint() -> None:
    with pytest.raises(InvalidRequest, match="oneOf must be an array"):
        compiled(_grammar([{"type": "null"}, {"type": "integer", "oneOf": "no list"}], {}), BYTES)


def test_one_of_proof_looks_at_100_schemas_that_must_hold_together() -> None:
    """A chain of references is a proof up to there; one that is longer, or leads round, is none."""

    def chain(length: int) -> dict[str, Any]:
        """The second branch leads to `string` behind so many references."""
        links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
        defs = {**links, f"d{length}": {"type": "string"}}
        return {"$defs": defs, "oneOf": [{"type": "null"}, {"$ref": "#/$defs/d0"}]}

    # The others are the last one, the first branch, and what stands beside `oneOf`.
    assert [one_of_as_any_of(chain(length))[1] == "" for length in (97, 98)] == [True, False]
    round_about = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}
    assert one_of_as_any_of(round_about)[1]
