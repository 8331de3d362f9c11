"""No accepted grammar fails in the middle of an output: its trial has an eighth of the engine's limits (C33)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from forebay.base.errors import InvalidRequest
from forebay.grammar.compiler import CHECKED, ENGINE, Work, compiled
from forebay.grammar.dry_run import DryRun
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind

WORDS = ['{"', '": ', '", "', "},", '"}', "[[", "]]", "  ", "    ", "abc", "k1", "value", "aaaa", "a,a,", "00", "\n"]
TOKENS = [b"</s>", *(bytes([byte]) for byte in range(256)), *map(str.encode, WORDS)]
VOCABULARY = Vocabulary(TOKENS, [0], [0])
TOKENIZER = VOCABULARY.tokenizer(lambda text: [1 + byte for byte in text.encode()])
NUM_TOKENS = 100


def _schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def _optional(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}, **more}


def _nested(inner: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner, "b": inner}}
    return inner


def families() -> Iterator[Grammar]:
    for count in (50, 490, 1000):
        yield _schema(_optional(count))
        yield _schema(_optional(count, additionalProperties=False))
        yield _schema({"type": "array", "items": _optional(count, additionalProperties={"type": "integer"})})
        yield _schema({"anyOf": [_optional(2, required=[f"k{i % 2}"]) for i in range(count // 4)]})
        yield _schema({"enum": [f"{'value ' * 3}{i}" for i in range(count)]})
        yield _schema({"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b+c*$"} for i in range(count // 4)]})
        yield Grammar(GrammarKind.REGEX, f"(a|b)*a(a|b){{{count // 20}}}")
        yield Grammar(GrammarKind.REGEX, "|".join(f"(a{{1,{i % 30 + 1}}},)*x{i}" for i in range(count // 4)))
    yield from (_schema(_nested(_optional(count), depth)) for count in (4, 60) for depth in (2, 5))
    yield _schema({"$defs": {"t": _optional(100, additionalProperties={"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"})
    yield _lark('start: e\ne: e e | "a"')
    yield _lark('start: e\ne: e e e | "a" | ""')
    yield _lark('start: e\ne: e "," e | "a"')
    yield _lark('start: s\ns: "a" s | "a"')
    yield _lark('start: s\ns: "a" "," s | "a"')
    yield _lark('start: "a" ("," "a")*')


def _allowed(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(TOKENS)]) if token]


def _breaks(grammar: Grammar, seed: int) -> str:
    """What an engine would say in the middle of one of the outputs; "" for nothing."""
    matcher, rng = compiled(grammar, TOKENIZER), random.Random(seed)
    for _ in range(NUM_TOKENS):
        allowed = _allowed(matcher)
        if matcher.is_error() or not allowed:
            break
        structure = [token for token in allowed if TOKENS[token].strip() and not TOKENS[token].isalnum()]
        matcher.consume_token(rng.choice(structure if structure and rng.random() < 0.5 else allowed))
    return str(matcher.get_error())


def _is_accepted(grammar: Grammar) -> bool:
    try:
        DryRun(VOCABULARY).run(grammar, TOKENIZER)
    except InvalidRequest:
        return False
    return True


def _outcomes(grammars: Iterator[Grammar], seeds: int) -> dict[bool, int]:
    outcomes = {True: 0, False: 0}
    for grammar in grammars:
        accepted = _is_accepted(grammar)
        outcomes[accepted] += 1
        for seed in range(seeds if accepted else 0):
            assert not _breaks(grammar, seed), (grammar.kind, grammar.text[:200])
    return outcomes


@pytest.mark.slow
def test_trial_adversarial_families_refuses_or_the_engine_completes() -> None:
    outcomes = _outcomes(families(), seeds=1)
    assert outcomes[True] >= 20
    assert outcomes[False] >= 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("text", ['start: e\ne: e e | "a"', 'start: e\ne: e e e | "a" | ""'])
def test_trial_grammar_whose_rows_grow_fast_refuses(text: str) -> None:
    assert not _is_accepted(_lark(text))


@pytest.mark.parametrize("count", [500, 1000, 2000])
def test_trial_many_optional_properties_refuses_with_the_limit(count: int) -> None:
    with pytest.raises(InvalidRequest, match="max is 2000"):
        DryRun(VOCABULARY).run(_schema(_optional(count)), TOKENIZER)


def test_engine_limits_are_eight_times_those_of_a_trial() -> None:
    assert CHECKED.times(8) == ENGINE
    assert Work(1, 2, 3, 4).times(2) == Work(2, 4, 6, 8)
