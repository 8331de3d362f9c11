"""C28 with adapters: they are made for the comparison, and each answer is compared with that of its own adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.families.checkpoint import open_checkpoint
from forebay.formats.adapters import read_adapter
from forebay.formats.random_adapter import write_random_adapter
from forebay.requests.sampling_params import SamplingParams
from forebay.verify import adapters
from forebay.verify.adapters import adapted, made_adapters, settings
from forebay.verify.asking import Engines
from forebay.verify.questions import Question
from forebay.verify.run import Verification
from forebay.verify.verdict import Verdict
from tests.verify.test_verify import small_model, tokenizer

__all__ = ["small_model", "tokenizer"]  # fixtures
LAYERS = {"model.layers.0.self_attn.q_proj": (24, 16), "model.layers.0.mlp.down_proj": (16, 40)}


def test_random_adapter_is_read_again_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        write_random_adapter(tmp_path / str(number), LAYERS, rank=3, seed=seed)
        found.append(read_adapter(tmp_path / str(number), layers=LAYERS, rename=str, max_rank=3))
    assert {layer: (pair.rank, pair.b.shape) for layer, pair in found[0].pairs.items()} == {
        layer: (3, (outputs, 3)) for layer, (outputs, _) in LAYERS.items()
    }
    assert found[0].digest == found[1].digest != found[2].digest


def test_each_question_is_asked_of_an_adapter_and_of_the_model() -> None:
    asked = adapted([Question([number], SamplingParams(), "greedy", number) for number in range(5)])
    assert [question.prompt for question in asked] == [[number] for number in (*range(5), *range(5))]
    assert [question.number for question in asked] == [*range(5), *range(5)]
    assert [question.adapter for question in asked] == ["one", "one", "two", "two", "one", *[""] * 5]


def test_made_adapters_have_all_layers_that_can_have_one_and_are_removed(small_model: Path) -> None:
    with made_adapters(str(small_model), seed=0) as paths:
        num_layers = open_checkpoint(str(small_model)).config.num_layers
        sizes = [(path / "adapter_model.safetensors").stat().st_size for path in paths.values()]
        assert sizes[0] < sizes[1], "their ranks differ"
        assert sizes[0] > num_layers * 7 * 3 * 2 * 64 * 4
    assert not any(path.exists() for path in paths.values())


@pytest.mark.slow
async def test_adapters_are_left_out_with_the_reason_where_no_layer_can_have_one(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "adaptable_layers", lambda path: {})
    verification = Verification({"model_path": str(small_model)}, num=2, max_tokens=8, seed=0)
    circumstance = next(one for one in verification.circumstances if one.adapted)
    outcome = await verification.outcome(circumstance)
    assert (outcome.verdict, outcome.what) == (Verdict.LEFT_OUT, "no layer of this model can have an adapter")


@pytest.mark.slow
async def test_adapters_change_no_token_of_others_and_one_of_another_load_would_be_found(small_model: Path) -> None:
    verification = Verification({"model_path": str(small_model)}, num=4, max_tokens=16, seed=0)
    await verification.ask_alone()
    anew = next(one for one in verification.circumstances if one.name == "adapters loaded anew")

    async def confused(engines: Engines) -> None:
        await engines.load_anew()
        engines._adapters = {name: (name, path) for name, (_, path) in engines._adapters.items()}
        await engines.ask_one_by_one()

    outcomes = [await verification.outcome(one) for one in (anew, replace(anew, play=confused))]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.SAME, Verdict.DIFFERENT], outcomes
    different = {difference.adapter for difference in outcomes[1].findings.differences}
    assert different <= {"one", "two"}, "and of the model's answers none"


def test_settings_of_the_comparison_have_two_ranks_and_two_slots_for_each_adapter() -> None:
    """The adapters differ in rank; one that is loaded anew has a slot beside its old one."""
    assert settings({"one": Path("/1"), "two": Path("/2")}) == {
        "enable_lora": True,
        "lora_modules": ("one=/1", "two=/2"),
        "max_loras": 2 + 2,
        "max_lora_rank": 8,
    }
    assert adapters.RANKS == {"one": 3, "two": 8}
