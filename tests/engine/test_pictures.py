"""Pictures in an engine whose memory is given back and whose weights change (C25)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from forebay.engine.frames import AddRequest, UpdateWeights
from forebay.engine.loop.core import EngineCore
from forebay.requests.sampling_params import SamplingParams
from tests.engine.test_sleep import SUBSETS, core_of, other_weights, poison
from tests.integration.test_pictures import Album, Prompt
from tests.models.visual import TEXT, TYPES, VisualModel, shared_visual

COUNT = 6


@pytest.fixture(scope="module")
def model() -> VisualModel:
    return shared_visual("smolvlm")


@pytest.fixture(scope="module")
def prompts(model: VisualModel) -> list[Prompt]:
    album, rng = Album(model), random.Random(5)
    text = [[rng.choice(TEXT) for _ in range(7)] for _ in range(3)]
    return [album.prompt(text[0], (1, 2), text[1]), album.prompt(text[0], (2, 2), text[1]), album.prompt(text[2])]


def add(core: EngineCore, request_id: int, prompt: Prompt) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    wanted = AddRequest(request_id=request_id, prompt_token_ids=prompt.ids, params=params, pictures=prompt.pictures)
    assert not core.add(wanted)


def tokens_of(core: EngineCore, prompts: list[Prompt]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {number: [] for number in range(1, len(prompts) + 1)}
    for number, prompt in enumerate(prompts, 1):
        add(core, number, prompt)
    while not core.idle:
        for update in core.step():
            assert update.failure is None, update.failure
            tokens[update.request_id] += update.token_ids
    core.scheduler.audit()
    return list(tokens.values())


@pytest.mark.quick(1)
@pytest.mark.parametrize("tags", SUBSETS, ids=" ".join)
def test_c25_tokens_behind_pictures_are_the_same_after_a_sleep(
    model: VisualModel, prompts: list[Prompt], tags: tuple[str, ...]
) -> None:
    core = core_of(model.path)
    right = tokens_of(core, prompts)
    for _ in range(2):
        core.sleeper.sleep(tags)
        poison(core)
        core.sleeper.wake()
        assert tokens_of(core, prompts) == right


def test_new_weights_encode_pictures_anew(model: VisualModel, prompts: list[Prompt], tmp_path: Path) -> None:
    core, other = core_of(model.path), other_weights(model.path, tmp_path / "other")
    before = tokens_of(core, prompts)
    core.sleeper.update(str(other), {})
    updated = tokens_of(core, prompts)
    assert updated == tokens_of(core_of(other), prompts) != before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "lfm2_vl" else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_new_weights_leave_nothing_of_the_old_in_encodings(name: str, tmp_path: Path) -> None:
    model = shared_visual(name)
    weights = other_weights(model.path, tmp_path / "other", kept="layer_scalar")  # numbers of recorded steps must stay
    core, other = core_of(model.path), core_of(weights)
    prompt = Album(model).prompt([TEXT[0]], (1, 1), [TEXT[1]])
    before = encoding_of(core, prompt)
    core.sleeper.update(str(weights), {})
    assert torch.equal(updated := encoding_of(core, prompt), encoding_of(other, prompt))
    assert not torch.equal(updated, before)


def encoding_of(core: EngineCore, prompt: Prompt) -> torch.Tensor:
    tokens_of(core, [prompt])
    (encoding,) = core.scheduler.pools.pictures.rows
    return core._runner.encodings.rows[torch.from_numpy(encoding.rows)].clone()


def test_requests_that_an_update_makes_wait_are_encoded_with_the_new_weights(
    model: VisualModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Some of their encodings were done or under way; their pixels are still there."""
    core, other = core_of(model.path), other_weights(model.path, tmp_path / "other")
    for number, prompt in enumerate(prompts, 1):
        add(core, number, prompt)
    for _ in range(2):
        assert not any(update.token_ids for update in core.step())
    core.sleeper.handle(UpdateWeights(serial=1, path=str(other), mode="retract"))
    tokens: dict[int, list[int]] = {number: [] for number in range(1, len(prompts) + 1)}
    while not core.idle:
        for update in core.step():
            assert update.failure is None, update.failure
            tokens[update.request_id] += update.token_ids
    core.scheduler.audit()
    assert list(tokens.values()) == tokens_of(core_of(other), prompts)
