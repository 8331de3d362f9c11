"""Questions with pictures, for models whose rotary positions depend on them (M-RoPE)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.base.pixels import num_pixel_bytes
from forebay.families.config.model_config import config_from_folder
from forebay.families.config.vision.base import VisionConfig
from forebay.requests.pictures import Picture, digest_of
from forebay.verify.questions import Question

PICTURES: Final = "pictures"  # among the kinds of cache, of a model that takes some
_MOST: Final = 4  # rows and columns of tokens
_SHARED: Final = 4  # every so many questions have the same pictures again


def encoder_of(path: Path) -> VisionConfig | None:
    """Return the encoder of a checkpoint in a folder, None if its pictures have no rotary positions in a grid."""
    if not path.is_dir():
        return None
    config = config_from_folder(path)
    return config.vision if config.rope_sections is not None else None


def pictured(questions: Sequence[Question], vision: VisionConfig | None, seed: int) -> list[Question]:
    """Return each question with a picture in the middle of its prompt, and then each without; none without an
    encoder."""
    if vision is None:
        return []
    return [*(_with_picture(question, vision, seed) for question in questions), *questions]


def _with_picture(question: Question, vision: VisionConfig, seed: int) -> Question:
    rng = random.Random(f"{seed} {question.number % _SHARED}")
    grid = rng.randint(2, _MOST), rng.randint(2, _MOST)
    sizes = ((grid[0] * vision.token_edge, grid[1] * vision.token_edge),)
    pixels = rng.randbytes(num_pixel_bytes(sizes))
    at, num = len(question.prompt) // 2, grid[0] * grid[1]
    picture = Picture(digest=digest_of(pixels, grid, sizes), grid=grid, sizes=sizes, pixels=pixels, runs=((at, num),))
    prompt = [*question.prompt[:at], *[vision.placeholder] * num, *question.prompt[at:]]
    return question._replace(prompt=prompt, pictures=(picture,))
