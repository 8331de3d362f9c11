"""Bodies: whatever the bytes are, a typed refusal or an object that strict JSON agrees with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.base.errors import InvalidRequest
from forebay.base.json_text import MAX_DEPTH
from forebay.http.bodies import parse_json_object
from forebay.server.app import ROUTES
from tests.fuzz.mutants import fuzz, mutated, outcome, seeds
from tests.tiers import examples

BODIES = [
    b'{"prompt": "hello", "max_tokens": 5, "temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": -1.5}}',
    b'{"prompt": [1, 2, 3], "n": 2, "stream": true, "stream_options": {"include_usage": true}, "seed": -7}',
    b'{"prompt": ["x", [1, 2], "y"], "echo": true, "logprobs": 3, "stop_token_ids": [4, 5], "user": "u"}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\u00e9\\ud83c\\udf89\\n"}]}]}',
    b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n_1"}], "top_p": 1}',
    b'{"messages": [], "chat_template_kwargs": {"enable_thinking": false}, "metadata": {"a": "b"}, "tools": []}',
    b'{"tokens": [1, 2, 3], "skip_special_tokens": true}',
    b'{"a": {"b": {"c": [[[[[[[[1e5, -0.0, 1E+2, null, true]]]]]]]]}}, "\\"": "\\\\"}',
]


class Twice(Exception):
    pass


def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(found)) != len(found):
        raise Twice
    return dict(found)


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


def strict_object(body: bytes) -> dict[str, Any] | None:
    """What the standard library makes of it, under our rules."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=pairs, parse_constant=lambda name: 1 / 0)
    except (ValueError, Twice, ZeroDivisionError, RecursionError):
        return None
    return value if isinstance(value, dict) and depth(value) <= MAX_DEPTH else None


def check(body: bytes) -> None:
    value, right = outcome(InvalidRequest, parse_json_object, body), strict_object(body)
    if isinstance(value, InvalidRequest):
        assert right is None, value.message
        return
    assert value == right
    for kind in {route.body for route in ROUTES if route.body is not None}:
        parsed = outcome(InvalidRequest, kind.parse, value)
        assert isinstance(parsed, kind) or kind.__name__ not in parsed.message


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", seeds(2, 100))
def test_d7_a_body_is_refused_or_read_as_strict_json_reads_it(seed: int) -> None:
    fuzz(seed, examples(600), lambda rng: mutated(rng, BODIES), check)


def test_a_string_that_is_not_closed_is_looked_at_once() -> None:
    """Were each quote in it tried as the start of a string of its own, 30 kB would take seconds, and the brackets in it
    would count as nesting."""
    for count in (100, 1_000_000):
        with pytest.raises(InvalidRequest, match="Unterminated string"):
            parse_json_object(b'"' + rb"\"[" * count)
