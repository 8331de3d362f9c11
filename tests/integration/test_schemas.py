"""Whatever a real engine finishes under a JSON schema is valid by it: of every kind of schema, with models that know
JSON and models that know nothing, greedy and sampled, several of one prompt, however steps are made. And the tokens are
the same in all of that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import torch

from forebay.config.engine_config import SpeculationOptions
from forebay.families.checkpoint import open_checkpoint
from forebay.grammar.matching import Grammars
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.requests.updates import FinishReason
from forebay.speculation.ngram import Ngram
from forebay.text.tokenizer import Tokenizer
from tests.grammar.schemas import KINDS, Schema, schemas
from tests.integration.rig import Engine, Result, Rig
from tests.kernels import NATIVE
from tests.models.heads import make_headed
from tests.models.tiny import make_oracle
from tests.text.tiny_tokenizer import tiny_tokenizer

CONTEXT: Final = 512
MOST: Final = 120
COLUMNS: Final = 300
WAYS: Final = (None, 1, 2)  # greedy, and two choices of one prompt by their seeds
TIGHT: dict[str, Any] = {"num_tokens": 448, "page_size": 4, "schedule_conservativeness": 0.0, "radix_cache": True}
SHAPES: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 5},
    "overlap": {"overlap_depth": 1},
    "retraction": TIGHT,
    "guesses": {"width": 4},
    "all of them": {"overlap_depth": 1, "width": 4, "chunked_prefill_size": 5, **TIGHT},
}
PARTS: Final = [slice(at, at + 40) for at in range(0, 200, 40)]  # more would not fit into the queue
slow = pytest.mark.slow


@dataclass(frozen=True)
class Known:
    """A model, its text, and what it says to each schema in each of the ways, alone in its shape of steps."""

    rig: Rig
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    vocab_size: int
    headed: bool = False

    @cached_property
    def grammars(self) -> Grammars:
        """Of all its engines, one behind the other: what is compiled once is there at once, and steps are the same."""
        vocabulary = Vocabulary.of(self.tokenizer.table, self.ends, self.vocab_size)
        return Grammars(lambda: vocabulary.tokenizer(self.encode), self.vocab_size)

    def engine(self, *, width: int = 1, **shape: Any) -> Engine:
        proposer = Ngram(SpeculationOptions()) if width > 1 and not self.headed else None
        made = self.rig.engine(width=width, proposer=proposer, grammars=self.grammars, **shape)
        plan = made.core.scheduler.plan
        made.core.scheduler.plan = lambda now, *_: plan(now, width)
        return made

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def run(self, made: Engine, asked: list[Schema]) -> list[Result]:
        prompts, params = [], []
        for i, schema in enumerate(asked):
            grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
            for seed in WAYS:
                prompts.append(self.encode(f"A value that is valid, number {i}, as JSON: "))
                drawn = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
                own = SamplingParams(max_new_tokens=MOST, stop_token_ids=self.ends, grammar=grammar, **drawn)
                params.append(own)
        prompts.append(prompts[0])  # one without a grammar beside them
        params.append(SamplingParams(max_new_tokens=3 * MOST, temperature=0.0, ignore_eos=True))
        return made.run(prompts, params)

    def check(self, asked: list[Schema], results: list[Result]) -> None:
        whole = 0
        for i, result in enumerate(results[:-1]):
            if result.finish is FinishReason.STOP:
                whole += 1
                schema = asked[i // len(WAYS)]
                text = b"".join(map(self.tokenizer.table.in_text, result.token_ids)).decode()
                jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(json.loads(text))
            else:
                assert result.finish is FinishReason.LENGTH
        assert whole > 0.5 * len(asked) * len(WAYS)  # of the others some digits or blanks went on


def _random(folder: Path) -> Known:
    make_oracle("llama", vocab_size=COLUMNS, max_position_embeddings=CONTEXT).save_pretrained(folder)
    rig = Rig(folder, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=CONTEXT)
    return Known(rig, tiny_tokenizer(COLUMNS), (2,), COLUMNS)


def _headed(folder: Path) -> Known:
    make_headed("qwen3_next", folder, vocab_size=COLUMNS, max_position_embeddings=CONTEXT)
    rig = Rig(folder, dtype=torch.float32, kernels=NATIVE, num_threads=1, context_length=CONTEXT, draft_head=True)
    return Known(rig, tiny_tokenizer(COLUMNS), (2,), COLUMNS, headed=True)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return _random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def headed_model(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return _headed(tmp_path_factory.mktemp("headed"))


@pytest.fixture(scope="module")
def trained_model(embedded_model: Path, embedded_rig: Rig) -> Known:
    config = open_checkpoint(str(embedded_model)).config
    return Known(embedded_rig, Tokenizer.from_path(embedded_model), config.eos_token_ids, config.vocab_size)


def same_in(known: Known, asked: list[Schema], shapes: dict[str, dict[str, Any]]) -> None:
    expected = known.run(known.engine(), asked)
    known.check(asked, expected)
    for name, shape in shapes.items():
        made = known.engine(**shape)
        found = known.run(made, asked)
        known.check(asked, found)
        assert [result.token_ids for result in found] == [result.token_ids for result in expected], name
        few = len(asked) < len(KINDS)  # whose outputs may all fit
        assert few or "num_tokens" not in shape or made.count("retractions"), name
        assert "width" not in shape or made.count("draft_tokens" if known.headed else "accepted_tokens"), name


@pytest.mark.slow
def test_outputs_are_valid_and_the_same_by_a_schema_of_each_kind(random_model: Known) -> None:
    same_in(random_model, schemas()[: len(KINDS)], {"all of them": SHAPES["all of them"]})


@slow
@pytest.mark.parametrize("part", PARTS)
def test_outputs_of_a_random_model_are_valid_by_all_schemas(random_model: Known, part: slice) -> None:
    same_in(random_model, schemas()[part], SHAPES)


@slow
@pytest.mark.parametrize("part", PARTS)
def test_outputs_are_valid_if_a_draft_head_drafts_for_unconstrained_rows(headed_model: Known, part: slice) -> None:
    same_in(headed_model, schemas()[part], {name: SHAPES[name] for name in ("guesses", "all of them")})


@slow
@pytest.mark.parametrize("part", range(20))
def test_outputs_of_the_embedded_model_are_valid_by_all_schemas(trained_model: Known, part: int) -> None:
    """Ten schemas at a time, each time in another shape."""
    name = list(SHAPES)[part % len(SHAPES)]
    same_in(trained_model, schemas()[10 * part : 10 * part + 10], {name: SHAPES[name]})
