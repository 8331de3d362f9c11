"""The fields that say what an answer must look like become a grammar, or are refused by the client's own names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.server.conftest import Running

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
WRITTEN = '{"type":"object","properties":{"é":{"type":"integer"}}}'
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
FIELDS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
    ({"response_format": NAMED}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
    ({"response_format": {"type": "structural_tag", **TAG}}, Grammar(GrammarKind.STRUCTURAL, json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
    ({"structured_outputs": {"json": WRITTEN}}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
    ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"structural_tag": TAG}}, Grammar(GrammarKind.STRUCTURAL, json.dumps(TAG))),
    ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
]
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_field", "missing"),
    (
        {"response_format": {**NAMED, "json_schema": {"name": "n", "schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
        "grammar_invalid",
        "strin",
    ),
    ({"guided_json": '{"a": \n 1,}'}, "guided_json", "grammar_invalid", "line 2"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "grammar_invalid", "/nowhere"),
    ({"guided_regex": "(a"}, "guided_regex", "grammar_invalid", "unclosed group"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "grammar_invalid", "not empty"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "grammar_invalid", '"x"'),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_field", "xml"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "invalid_combination", "guided_json"),
    ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos", "invalid_value", "end"),
]


def post(server: Running, path: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    with server.client() as http:
        return http.post(path, json={**body, "max_tokens": 1, **fields})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_field_becomes_a_grammar(shared: Running, path: str) -> None:
    for fields, grammar in FIELDS:
        answer = post(shared, path, **fields)
        assert answer.status_code == 200, answer.text
        got = shared.engine.submitted[-1].params.grammar
        if grammar is not None and grammar.kind in (GrammarKind.STRUCTURAL, GrammarKind.CHOICE):
            assert (got.kind, json.loads(got.text)) == (grammar.kind, json.loads(grammar.text))
        else:
            assert got == grammar


@pytest.mark.parametrize(("fields", "param", "code", "word"), REFUSED)
def test_what_cannot_be_used_is_refused_by_its_field(
    shared: Running, fields: dict[str, Any], param: str, code: str, word: str
) -> None:
    answer = post(shared, "/v1/chat/completions", **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert word in error["message"]
