"""What a finished output looks like is certain under a grammar, whatever the model, and however its steps are made."""

from __future__ import annotations

import json
import re
import string
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from msgspec.structs import replace

from forebay.base.errors import InvalidRequest
from forebay.config.engine_config import SpeculationOptions
from forebay.engine.frames import AddRequest
from forebay.grammar import matching
from forebay.grammar.matching import Grammars
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.requests.updates import FinishReason, Update
from forebay.speculation.ngram import Ngram
from forebay.text.token_bytes import TokenBytes, byte_level
from tests.integration.rig import Engine, Rig
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB

EOS = 2
LETTERS = string.ascii_lowercase + string.digits + ' {}[]",:_-'
# The other columns only pad the vocabulary.
TABLE = TokenBytes(["<e>", "<s>", "</s>", *LETTERS], byte_level, set(range(3 + len(LETTERS))), {0, 1, 2})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["first", "second", 3]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORDS = Grammar(GrammarKind.REGEX, "(one|two|three)( and (one|two|three)){2,4}")
PROMPTS = [[9 + i, 40, 11, 12, 40, 11][: 3 + i] * 4 for i in range(4)]
SAMPLED = SamplingParams(max_tokens=90, temperature=1.5, seed=5, stop_token_ids=(EOS,))
ASKED = [
    replace(SAMPLED, grammar=JSON),
    replace(SAMPLED, grammar=WORDS, repetition_penalty=1.3, logit_bias={40: 100.0, VOCAB - 1: 100.0}),
    replace(SAMPLED, temperature=0.0, grammar=JSON, frequency_penalty=0.5),
    replace(SAMPLED, max_tokens=30),
]
PLAIN: dict[str, Any] = {}
SHAPES: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 5},
    "overlap": {"overlap_depth": 1},
    "retraction": {"num_tokens": 160, "page_size": 4, "schedule_conservativeness": 0.0, "radix_cache": True},
    "guesses": {"width": 4},
    "all of them": {
        "overlap_depth": 1,
        "num_tokens": 124,
        "page_size": 4,
        "schedule_conservativeness": 0.0,
        "width": 4,
        "chunked_prefill_size": 5,
    },
}


@pytest.fixture(scope="module")
def rig(tiny_checkpoint: Path) -> Rig:
    return Rig(tiny_checkpoint, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=256)


def grammars() -> Grammars:
    tokens = Vocabulary.of(TABLE, [EOS], VOCAB)
    return Grammars(lambda: tokens.tokenizer(lambda text: [3 + LETTERS.index(c) for c in text]), VOCAB)


def engine(rig: Rig, **shape: Any) -> Engine:
    width = shape.get("width", 1)
    proposer = Ngram(SpeculationOptions()) if width > 1 else None
    made = rig.engine(proposer=proposer, grammars=grammars(), **shape)
    plan = made.core.scheduler.plan
    made.core.scheduler.plan = lambda now, *_: plan(now, width)
    return made


def text_of(tokens: list[int]) -> str:
    return b"".join(map(TABLE.in_text, tokens)).decode()


@pytest.fixture(scope="module")
def plain(rig: Rig) -> list[list[int]]:
    return [engine(rig).tokens([prompt], params)[0] for prompt, params in zip(PROMPTS, ASKED, strict=True)]


def test_finished_outputs_are_what_their_grammars_say(plain: list[list[int]]) -> None:
    texts = [text_of(tokens) for tokens in plain[:3]]
    assert [tokens[-1] for tokens in plain[:3]] == [EOS] * 3
    for text in (texts[0], texts[2]):
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert re.fullmatch(WORDS.text, texts[1])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_tokens_come_however_steps_are_made(rig: Rig, plain: list[list[int]], shape: dict[str, Any]) -> None:
    made = engine(rig, **shape)
    known: Any = made.core.scheduler.queues.constraints.grammars
    for grammar in (JSON, WORDS):  # before anybody comes: who runs beside whom is then the same everywhere
        known._prototype(grammar).result()
    assert made.tokens(PROMPTS, ASKED) == plain
    assert not shape.get("num_tokens") or made.count("retractions")
    assert shape.get("width", 1) == 1 or made.count("accepted_tokens") > 20  # whatever a grammar forces


def test_requests_that_take_turns_in_steps_have_masks_of_their_own(rig: Rig, plain: list[list[int]]) -> None:
    """One step's masks are made on the thread of the steps while the next step is planned."""
    made = engine(rig, overlap_depth=1)
    known: Any = made.core.scheduler.queues.constraints.grammars
    for grammar in (JSON, WORDS):
        known._prototype(grammar).result()
    results = made.run(PROMPTS[:3], ASKED[:3], apart=1)
    assert [result.token_ids for result in results] == plain[:3]


def test_log_probabilities_are_the_model_s_own(rig: Rig) -> None:
    params = replace(SAMPLED, temperature=0.0, max_tokens=1, logprobs=0)
    (free,), (bound,) = (
        engine(rig).run(PROMPTS[:1], replace(params, grammar=grammar))
        for grammar in (None, Grammar(GrammarKind.CHOICE, '["zz"]'))
    )
    assert text_of(bound.token_ids) == "z"
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob
    assert bound.logprobs[0].rank > free.logprobs[0].rank == 1


def updates(made: Engine, **asked: Any) -> dict[int, list[Update]]:
    told: dict[int, list[Update]] = {}
    for i, (name, grammar) in enumerate(asked.items(), 1):
        params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(EOS,), grammar=grammar)
        for update in made.core.add(AddRequest(request_id=i, prompt_token_ids=[5, 6, 7], params=params)):
            told.setdefault(name, []).append(update)
    names = dict(enumerate(asked, 1))
    while not made.core.idle:
        for update in made.core.step():
            told.setdefault(names[update.request_id], []).append(update)
    made.core.scheduler.audit()
    return told


def test_a_grammar_that_cannot_be_used_ends_its_request_alone(rig: Rig) -> None:
    told = updates(engine(rig), free=None, bad=Grammar(GrammarKind.REGEX, "("), good=WORDS)
    assert told["bad"][-1].failure.code == "grammar_invalid"
    assert {told[name][-1].finish for name in ("free", "good")} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_broken_matcher_ends_its_request_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = matching._broken

    def breaks(place: Any) -> bool:
        if place.num_read == 3 and place.prototype is first[0]:
            place.error = "too complex"
        return broken(place)

    made = engine(rig)
    monkeypatch.setattr(matching, "_broken", breaks)
    first: list[Any] = []
    begin = Grammars.begin

    def begun(self: Grammars, req: Any) -> None:
        begin(self, req)
        first.append(self._places[req.id].prototype)

    monkeypatch.setattr(Grammars, "begin", begun)
    told = updates(made, bad=JSON, good=WORDS)
    assert told["bad"][-1].failure.code == "grammar_state"
    assert sum(len(update.token_ids) for update in told["bad"]) == 3
    assert told["good"][-1].failure is None


def test_cancelled_grammar_is_not_compiled_or_cached(rig: Rig) -> None:
    made = engine(rig)
    known = made.core.scheduler.queues.constraints.grammars
    assert isinstance(known, Grammars)
    gate: Future[None] = Future()
    known._compiling.submit(gate.result)
    params = replace(SAMPLED, grammar=JSON)
    for request_id in (1, 2):
        made.core.add(AddRequest(request_id=request_id, prompt_token_ids=[5, 6], params=params))
    made.core.abort(1)
    assert len(known._prototypes) == 1  # the other one waits
    made.core.abort(2)
    assert not known._prototypes
    gate.set_result(None)
    assert text_of(made.tokens([[5, 6]], params)[0]).startswith("{")


def test_ignoring_the_end_goes_with_no_grammar() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        replace(SAMPLED, grammar=JSON, ignore_eos=True).check(VOCAB)
