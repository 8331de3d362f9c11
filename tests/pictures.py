"""Small pictures for tests of the engine's host side: tiles of 2 x 2 pixels, 3 tokens each, an encoder of 4 layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from forebay.config.pictures import PictureConfig
from forebay.requests.pictures import Picture

SIDE: Final = 2
TILE_BYTES: Final = 3 * SIDE * SIDE
TOKENS: Final = 3  # of a tile
VOCAB: Final = 2000
PLACEHOLDER: Final = 9


def picture_config(num_blocks: int = 8, num_pixels: int = 8, **changes: Any) -> PictureConfig:
    """With room for the encodings of so many tiles, and for the pixels of so many."""
    num_rows = num_blocks * TOKENS
    asked = {
        "num_layers": 4,
        "layer_tokens": 2.0,
        "tokens_per_tile": TOKENS,
        "tile_bytes": TILE_BYTES,
        "num_rows": num_rows,
        "row_bytes": 10,
        "cache_bytes": num_rows * 10 + num_pixels * TILE_BYTES,
        "vocab_size": VOCAB,
        "placeholder": PLACEHOLDER,
    }
    return PictureConfig(**{**asked, **changes})


def picture(seed: int, *starts: int, num_tiles: int = 1, grid: tuple[int, int] = (1, 1), **changes: Any) -> Picture:
    """The picture of that number; each of its tiles has a run of tokens at one of `starts`."""
    pixels = bytes((seed + at) % 256 for at in range(num_tiles * TILE_BYTES))
    asked = {
        "digest": hashlib.sha256(pixels + str(grid).encode()).digest(),
        "grid": grid,
        "num_tiles": num_tiles,
        "height": SIDE,
        "width": SIDE,
        "pixels": pixels,
        "runs": tuple((start, TOKENS) for start in starts),
    }
    return Picture(**{**asked, **changes})


def with_placeholders(prompt: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """The prompt as it comes to an engine, with these pictures in it."""
    tokens = list(prompt)
    for its in pictures:
        for start, length in its.runs:
            tokens[start : start + length] = [PLACEHOLDER] * length
    return tokens
