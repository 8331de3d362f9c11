"""The check of a request's pictures, for every sender (C33)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from forebay.base.errors import InvalidRequest
from forebay.base.pixels import num_pixel_bytes
from forebay.config.engine_config import SchedulerConfig
from forebay.config.pictures import PictureConfig
from forebay.memory.slots import Ids
from forebay.requests.pictures import Picture

DIGEST_BYTES: Final = 32  # of SHA-256


def check_pictures(pictures: Sequence[Picture], prompt: Sequence[int], config: SchedulerConfig) -> None:
    """Raise InvalidRequest, with the numbers, unless the model accepts the pictures and each is at a placeholder of the
    prompt."""
    limits = config.pictures
    if limits is None:
        raise _wrong("this model takes no pictures: leave them out")
    for number, picture in enumerate(pictures):
        _check_shape(number, picture, limits)
        _check_runs(number, picture, np.array(prompt, dtype=np.int64), limits)
    runs = sorted(run for picture in pictures for run in picture.runs)
    for (start, length), (following, _) in pairwise(runs):
        if start + length > following:
            raise _wrong(f"two runs of pictures have the prompt's token {following}: each may be in one")


def _check_shape(number: int, picture: Picture, limits: PictureConfig) -> None:
    for height, width in picture.sizes:
        if not limits.takes((height, width)):
            raise _wrong(f"a tile of picture {number} has {height} x {width} pixels; the model takes {_sizes(limits)}")
    num_bytes = num_pixel_bytes(picture.sizes)
    if not picture.sizes or len(picture.pixels) != num_bytes:
        raise _wrong(
            f"picture {number} has {len(picture.sizes)} tiles and {len(picture.pixels)} bytes of pixels; tiles of "
            f"these sizes have {num_bytes}, and there is at least one"
        )
    if len(picture.digest) != DIGEST_BYTES:
        raise _wrong(f"the digest of picture {number} has {len(picture.digest)} bytes, not {DIGEST_BYTES}")


def _check_runs(number: int, picture: Picture, prompt: Ids, limits: PictureConfig) -> None:
    for start, length in picture.runs:
        _check_run(number, start, length, prompt, limits)
    if any(start + length > following for (start, length), (following, _) in pairwise(picture.runs)):
        raise _wrong(f"runs of picture {number} are not in the order of the prompt")
    rows, columns = picture.grid
    if limits.mrope and (len(picture.runs) != 1 or min(picture.grid) < 1 or rows * columns != picture.num_tokens):
        raise _wrong(
            f"picture {number} has {picture.num_tokens} tokens in {len(picture.runs)} runs; the model takes one run "
            f"of tokens, {rows} x {columns} by the grid"
        )
    if picture.num_tokens != (num_tokens := sum(map(limits.num_tokens, picture.sizes))):
        raise _wrong(f"picture {number} has {picture.num_tokens} tokens in the prompt, and its tiles have {num_tokens}")


def _check_run(number: int, start: int, length: int, prompt: Ids, limits: PictureConfig) -> None:
    if start < 0 or length < 1 or start + length > len(prompt):
        raise _wrong(
            f"picture {number} has a run of {length} tokens from {start} on; the prompt has {len(prompt)} tokens"
        )
    if limits.longest_span and length > limits.longest_span:
        raise _wrong(
            f"picture {number} has a run of {length} tokens, which one step must compute; the model takes at most "
            f"{limits.longest_span}"
        )
    if (prompt[start : start + length] != limits.placeholder).any():
        raise _wrong(
            f"the prompt has other tokens than the placeholder {limits.placeholder} among the {length} from {start} "
            f"on, which are picture {number}'s"
        )


def _sizes(limits: PictureConfig) -> str:
    if limits.tile_size is not None:
        return " x ".join(map(str, limits.tile_size))
    return (
        f"multiples of {limits.token_edge}, at most {limits.max_edge} on an edge, of at most {limits.max_tokens} tokens"
    )


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(what, code="invalid_picture", param="pictures")
