"""Draft heads guess what transformers' would, whatever the chunks, and also behind their own guesses."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.base.errors import ModelError
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import open_checkpoint
from forebay.models import needs_of
from tests.models.drive import Driver
from tests.models.heads import HEADS, Headed, make_headed, of_transformers
from tests.models.tiny import random_ids

TOLERANCE = {"rtol": 0, "atol": 1e-4}
LENGTH = 20


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    @functools.cache
    def made(case: str) -> Headed:
        return make_headed(case, tmp_path_factory.mktemp("headed"))

    return made


@pytest.fixture
def load_headed(ops):
    def load(path: Path):
        return models.load(open_checkpoint(path, draft_head=True), ops=ops, dtype=torch.float32, draft_head=True)

    return load


def step(driver, ids, next_ids):
    """The model over some more tokens of row 1, then its head: hidden states of both, and the head's logits."""
    ctx, input_ids = driver.inputs([(1, ids)])
    _, seen = driver.model.tapped(ctx, input_ids, ())
    drafted = driver.model.draft(ctx, torch.tensor(next_ids), seen)
    return seen, drafted, driver.model.logits(driver.model.joined(drafted))


@pytest.mark.quick(10)
@pytest.mark.parametrize("case", HEADS)
def test_a_draft_head_guesses_what_its_layers_do_in_transformers(case, headed, load_headed):
    oracle, ids = headed(case), random_ids(LENGTH + 1, seed=1)
    expected, logits = oracle.drafted(ids[1:], oracle.hidden(ids[:-1]))
    _, drafted, found = step(Driver(load_headed(oracle.path)), ids[:-1], ids[1:])
    torch.testing.assert_close(drafted, expected, **TOLERANCE)
    torch.testing.assert_close(found, logits, **TOLERANCE)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", ["deepseek_v3", "bailing_hybrid", "mellum", "glm4_moe"])
def test_a_draft_head_guesses_what_transformers_own_does(case, headed, load_headed):
    oracle, ids = headed(case), random_ids(LENGTH + 1, seed=2)
    hidden = oracle.oracle(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    expected = of_transformers(oracle)(ids[1:], hidden)  # fed with what its generation feeds it with
    _, drafted, _ = step(Driver(load_headed(oracle.path)), ids[:-1], ids[1:])
    torch.testing.assert_close(drafted, expected, **TOLERANCE)


@pytest.mark.parametrize("case", ["qwen3_next", "deepseek_v3", "deepseek_v32", "mellum", "nemotron_h", "deepseek_v4"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_are_the_same_to_a_draft_head(case, chunk, headed, load_headed):
    oracle, ids = headed(case), random_ids(LENGTH + 1, seed=3)
    expected, _ = oracle.drafted(ids[1:], oracle.hidden(ids[:-1]))
    driver = Driver(load_headed(oracle.path))
    firsts = range(0, LENGTH, chunk)
    found = [step(driver, ids[i : i + chunk][: LENGTH - i], ids[i + 1 : i + chunk + 1])[1] for i in firsts]
    torch.testing.assert_close(torch.cat(found), expected, **TOLERANCE)


@pytest.mark.parametrize("case", ["qwen3_5_text", "bailing_hybrid", "qwen4_exp_text", "deepseek_v4"])
def test_a_draft_head_goes_on_from_its_own_guesses(case, headed, load_headed):
    """The states it gives stand for those of the model: two guesses behind a sequence."""
    oracle, ids = headed(case), random_ids(LENGTH, seed=4)
    model = load_headed(oracle.path)
    driver, next_ids = Driver(model), ids[1:]
    hidden = oracle.hidden(ids[:-1])
    _, drafted, logits = step(driver, ids[:-1], next_ids)
    for _ in range(2):
        expected, of_oracle = oracle.drafted(next_ids, hidden)
        torch.testing.assert_close(logits[-1], of_oracle[-1], **TOLERANCE)
        hidden = torch.cat([hidden, expected[-1:]])
        guess = int(logits[-1].argmax())
        next_ids = [*next_ids, guess]
        ctx, _ = driver.inputs([(1, [guess])])
        drafted = model.draft(ctx, torch.tensor([guess]), drafted[-1:])
        logits = model.logits(model.joined(drafted))


@pytest.mark.parametrize("case", HEADS)
def test_what_a_draft_head_keeps_and_weighs_counts_only_where_it_is_wanted(case, headed, load_headed, load):
    path = headed(case).path
    with_head, without = load_headed(path), load(path)
    own = without.cache_specs()
    assert with_head.cache_specs()[: len(own)] == own
    assert len(with_head.cache_specs()) == len(own) + (2 if case == "deepseek_v32" else 1)
    assert with_head.weight_bytes > without.weight_bytes
    config = open_checkpoint(path).config
    assert needs_of(config, draft_head=True).cache_specs == with_head.cache_specs()
    assert needs_of(config).cache_specs == own


@pytest.mark.parametrize("case", HEADS)
def test_a_draft_head_changes_nothing_of_the_model(case, headed, load_headed, load):
    path, ids = headed(case).path, random_ids(LENGTH, seed=5)
    (alone,) = Driver(load(path)).step([(1, ids)])
    (beside,) = Driver(load_headed(path)).step([(1, ids)])
    assert torch.equal(alone, beside)


def test_files_without_a_draft_head_and_types_that_have_none_are_refused(tiny, load_headed):
    for case, told in (("qwen3_5_text", "no draft head"), ("llama", "of type llama")):
        with pytest.raises(ModelError, match=told):
            load_headed(tiny(case).path)


def test_the_shape_of_files_without_a_draft_head_is_not_one_with_it(tiny, headed, tmp_path):
    """So that a plan does not say of files that they draft, if a server would refuse them."""
    path = tiny("qwen3_5_text").path
    with pytest.raises(ModelError, match="no draft head"):
        read_shape(path, True)
    own = read_shape(headed("qwen3_5_text").path, True)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    assert read_shape(tmp_path, True).needs.cache_specs == own.needs.cache_specs  # what is not there may have one


def test_a_draft_head_of_other_layers_is_refused(headed):
    config = open_checkpoint(headed("nemotron_h").path).config
    with pytest.raises(ModelError, match="a draft head of moe layers"):
        needs_of(replace(config, draft_layers=("moe",)), draft_head=True)
