"""Whatever may be sampled under a JSON schema is valid by it, of every kind of schema."""

from __future__ import annotations

import json
import random

import jsonschema_rs
from llguidance import LLTokenizer

from forebay.grammar.compiler import compiled
from forebay.requests.sampling_params import Grammar, GrammarKind
from tests.grammar.schemas import schemas

MOST = 400


def test_random_outputs_are_valid_by_two_hundred_schemas() -> None:
    tokenizer, num_finished = LLTokenizer("byte"), 0
    made = schemas()
    assert len({json.dumps(schema) for schema in made}) > 150
    for schema in made:
        prototype = compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), tokenizer)
        valid = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for seed in range(3):
            matcher, rng, out = prototype.deep_copy(), random.Random(seed), bytearray()
            while len(out) < MOST:
                mask = matcher.compute_bitmask()
                allowed = [token for token in range(256) if mask[token // 8] >> (token % 8) & 1]
                if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
                    break
                assert allowed, (schema, bytes(out), matcher.get_error())
                ends = ord('"') in allowed and rng.random() < 0.3
                out.append(ord('"') if ends else rng.choice(allowed))
                assert matcher.consume_token(out[-1])
            else:
                continue
            num_finished += 1
            assert valid.is_valid(json.loads(out)), (schema, bytes(out))
    assert num_finished > 2.9 * len(made)
