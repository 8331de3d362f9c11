"""Small pictures for tests of the engine's host side: a token for 2 x 2 pixels, tiles of 3 tokens unless they say
otherwise, an encoder of 4 layers, a block for 3 tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from forebay.base.pixels import num_pixel_bytes
from forebay.config.pictures import PictureConfig
from forebay.requests.pictures import Picture

EDGE: Final = 2
SIZE: Final = (EDGE, 3 * EDGE)
TILE_BYTES: Final = num_pixel_bytes([SIZE])
TOKENS: Final = 3  # of a tile
VOCAB: Final = 2000
PLACEHOLDER: Final = 9


def picture_config(
    num_blocks: int = 8, num_pixels: int = 8, *, layer_tokens: float = 2.0, **changes: Any
) -> PictureConfig:
    """With room for the encodings of so many tiles of 3 tokens, and for the pixels of so many. A layer's work on such a
    tile costs `layer_tokens`."""
    num_rows = num_blocks * TOKENS
    asked = {
        "num_layers": 4,
        "token_edge": EDGE,
        "tile_size": None,
        "max_edge": 8 * EDGE,
        "max_tokens": 8,
        "token_cost": layer_tokens / TOKENS,
        "pair_cost": 0.0,
        "block_rows": TOKENS,
        "num_rows": num_rows,
        "row_bytes": 10,
        "cache_bytes": num_rows * 10 + num_pixels * TILE_BYTES,
        "vocab_size": VOCAB,
        "placeholder": PLACEHOLDER,
        "input_id": PLACEHOLDER,
    }
    return PictureConfig(**{**asked, **changes})


def picture(seed: int, *starts: int, num_tiles: int = 1, grid: tuple[int, int] = (1, 1), **changes: Any) -> Picture:
    """The picture of that number; each of its tiles of 3 tokens has a run of them at one of `starts`."""
    sizes = changes.pop("sizes", (SIZE,) * num_tiles)
    pixels = bytes((seed + at) % 256 for at in range(num_pixel_bytes(sizes)))
    asked = {
        "digest": hashlib.sha256(pixels + f"{grid}{sizes}".encode()).digest(),
        "grid": grid,
        "sizes": sizes,
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
