"""Sizes of tiles of pixels, which pictures of a prompt are cut into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Size = tuple[int, int]
"""Of a tile in pixels: height and width."""

CHANNELS: Final = 3


def num_tokens(size: Size, token_edge: int) -> int:
    """Return the number of tokens of a tile with a token for each `token_edge` x `token_edge` pixels."""
    height, width = size
    return (height // token_edge) * (width // token_edge)


def num_pixel_bytes(sizes: Iterable[Size]) -> int:
    """Return the bytes of the pixels of tiles of these sizes."""
    return CHANNELS * sum(height * width for height, width in sizes)
