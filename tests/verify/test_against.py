"""`forebay verify --against transformers`: greedy answers beside another implementation of the model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.base.errors import ConfigError
from forebay.cli.main import main
from forebay.cli.verify_engine import _all_taken
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.verify.against import against_transformers, compared, is_plain
from forebay.verify.run import Baseline, Outcome, Verification
from forebay.verify.verdict import Verdict, exit_code
from tests.verify.test_verify import QUESTION, said, small_model

__all__ = ["small_model"]  # a fixture


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"presence_penalty": 0.5}, False),
        ({"grammar": Grammar(GrammarKind.JSON_SCHEMA, "{}")}, False),
    ],
)
def test_only_answers_by_the_logits_alone_are_compared(changes: dict[str, Any], plain: bool) -> None:
    params = SamplingParams(**{"temperature": 0.0, **changes})
    assert is_plain(QUESTION._replace(params=params)) is plain


@pytest.mark.parametrize(
    ("dtype", "margin", "verdict"),
    [
        ("float32", 0.001, Verdict.SAME),
        ("float32", 0.1, Verdict.DIFFERENT),
        ("bfloat16", 0.1, Verdict.SAME),
        ("bfloat16", 0.6, Verdict.DIFFERENT),
    ],
)
def test_answer_differs_from_the_first_token_below_the_margin_of_its_type(
    dtype: str, margin: float, verdict: Verdict
) -> None:
    places = [SimpleNamespace(best=5, margin=0.0, apart=0.0), SimpleNamespace(best=8, margin=margin, apart=0.2)]
    verification: Any = SimpleNamespace(
        config=SimpleNamespace(types=SimpleNamespace(dtype=dtype)),
        questions=[QUESTION._replace(params=SamplingParams(temperature=0.0)), QUESTION],
        baseline=Baseline([said([5, 6]), said([5, 6])]),
    )
    beside: Any = SimpleNamespace(places=lambda prompt, tokens, reported: places)
    outcome = compared("against", beside, cast(Verification, verification))
    assert (outcome.verdict, outcome.findings.num_answers, outcome.findings.num_tokens) == (verdict, 1, 2)
    found = [(one.place, one.expected, one.found, one.gap) for one in outcome.findings.differences]
    assert found == ([(1, 8, 6, margin)] if verdict is Verdict.DIFFERENT else [])


async def test_without_transformers_it_says_what_to_install(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forebay.models.transformers_model", None)
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    with pytest.raises(ConfigError, match="pip install transformers"):
        await against_transformers(verification)


async def test_gguf_file_is_left_out_and_a_comparison_that_was_asked_for_and_left_out_is_no_success(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    left_out = await against_transformers(cast(Any, SimpleNamespace(config=SimpleNamespace(model_path=str(path)))))
    assert (left_out.verdict, left_out.what.partition(":")[0]) == (Verdict.LEFT_OUT, "model.gguf is a GGUF file")
    outcomes = [left_out, Outcome("another", Verdict.SAME, ""), Outcome("a third", Verdict.LEFT_OUT, "")]
    assert [exit_code(found, _all_taken(found)) for found in (outcomes, outcomes[1:])] == [2, 0]


@pytest.mark.slow
async def test_answers_of_a_small_model_are_those_of_transformers_until_its_weights_differ(
    small_model: Path, tmp_path: Path
) -> None:
    verification = Verification({"model_path": str(small_model), "dtype": "float32"}, num=4, max_tokens=16, seed=0)
    await verification.ask_alone()
    same = await against_transformers(verification)
    assert same.verdict is Verdict.SAME, same.what
    assert same.findings.num_tokens == 16, "the first question alone is greedy without penalties"
    other = tmp_path / "other"
    assert main(["models", "make", "--like", "llama", "--out", str(other), "--hidden-size", "64", "--seed", "1"]) == 0
    verification.config = replace(verification.config, model_path=str(other))
    different = await against_transformers(verification)
    assert different.verdict is Verdict.DIFFERENT
    assert different.findings.differences[0].gap > 0.01
    verification.config = replace(verification.config, model_path=str(tmp_path))
    assert (await against_transformers(verification)).verdict is Verdict.LEFT_OUT
