"""C28: models with M-RoPE are asked with pictures, too; such a circumstance counts for answers to pictures alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.base.pixels import num_pixel_bytes
from forebay.requests.pictures import digest_of
from forebay.verify.pictures import encoder_of
from forebay.verify.run import Verification
from tests.verify.test_tiers import made
from tests.verify.test_verify import said

WITH_PICTURES = {"pictures beside texts", "all of it, pictures"}


@pytest.fixture(scope="module")
def verification(tmp_path_factory: pytest.TempPathFactory) -> Verification:
    path = made("qwen3_5", tmp_path_factory.mktemp("visual"))
    return Verification({"model_path": path}, num=8, max_tokens=8, seed=3)


def test_each_question_is_asked_with_a_picture_in_its_prompt_and_without(verification: Verification) -> None:
    vision = encoder_of(Path(verification.config.model_path))
    assert vision is not None
    shown, plain = verification._pictured[:8], verification._pictured[8:]
    assert plain == verification.questions
    for question, text in zip(shown, plain, strict=True):
        (picture,) = question.pictures
        ((at, num),) = picture.runs
        assert question.prompt[at : at + num] == [vision.placeholder] * num
        assert [*question.prompt[:at], *question.prompt[at + num :]] == text.prompt
        assert num == picture.grid[0] * picture.grid[1] == vision.num_tokens(picture.sizes[0])
        assert len(picture.pixels) == num_pixel_bytes(picture.sizes)
        assert picture.digest == digest_of(picture.pixels, picture.grid, picture.sizes)
    assert len({question.pictures[0].digest for question in shown}) == 4, "each is asked with two prompts"


@pytest.mark.slow
def test_circumstances_with_pictures_are_for_models_that_take_them(verification: Verification, tmp_path: Path) -> None:
    found = [one for one in verification.circumstances if one.pictured]
    assert {one.name for one in found} == WITH_PICTURES
    dense = Verification({"model_path": made("llama", tmp_path)}, num=2, max_tokens=8, seed=0)
    assert not any(one.pictured for one in dense.circumstances)


def test_circumstance_with_pictures_counts_for_answers_to_pictures_beside_others(verification: Verification) -> None:
    one = next(one for one in verification.circumstances if one.name == "pictures beside texts")
    engines: Any = None
    shown, text = verification._pictured[0], verification._pictured[8]
    together = replace(said([5]), concurrency=2)
    touched = [one.touched(engines, question, answer) for question in (shown, text) for answer in (together, said([5]))]
    assert touched == [True, False, False, False]


def test_circumstances_with_little_memory_have_room_for_their_context_on_pages_of_one_token(
    verification: Verification,
) -> None:
    """C28: a picture makes a prompt longer, and the memory of circumstances without pictures has no room for it."""
    given = {"model_path": verification.config.model_path, "page_size": 1}
    small = Verification(given, num=9, max_tokens=8, seed=3)
    little = [one for one in small.circumstances if "max_total_tokens" in one.flags and not one.adapted]
    assert {one.pictured for one in little} == {True, False}
    for one in little:
        small._resolved({**small._roomy[2 if one.pictured else 0], **one.flags})
