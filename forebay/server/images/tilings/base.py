"""Parameters that every way of cutting images has, and how they are read from a checkpoint's files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size, num_tokens
from forebay.families.config.model_config import ProcessorFiles

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FILTERS: Final = 6
ONE_TILE: Final = (0, 0)
"""The grid of an image that is one tile."""


class Tiles(NamedTuple):
    """An image as its tiles of these `sizes` (height and width), in rows and columns of a `grid`; behind those of a
    grid may come all of the image as one. `pixels` are those of one tile after another, each uint8
    [height, width, 3]."""

    grid: tuple[int, int]
    sizes: tuple[Size, ...]
    pixels: bytes


class Cutting(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of every way. A tile has a token of the prompt for each `token_edge` x `token_edge` pixels, each
    the `placeholder`. Pillow's filter `resample` resizes."""

    placeholder: int
    token_edge: int
    resample: int

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image to tiles: if it does not `splits`, to as few tokens as the model's type has."""
        raise NotImplementedError

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image of these tiles, in which `image` is the text of a token."""
        raise NotImplementedError

    def framed(self, spell: Callable[[int], str]) -> tuple[str, str] | None:
        """Return two texts: the one that templates write for an image, and its replacement with one placeholder.
        Returns None if templates write the placeholder themselves. `spell` returns the text of a token."""
        return None

    def written(self, token: str) -> str:
        """Return what the model's own template writes for an image: `token`, and the texts around it."""
        return token

    def num_tokens(self, size: Size) -> int:
        """Return the number of tokens of a tile."""
        return num_tokens(size, self.token_edge)


def closest_grid(height: int, width: int, edge: int, grids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the rows and columns of squares of `edge` pixels whose ratio is closest to the image's. Of two that are
    equally close, return the later one if the image has more than half of its pixels. `grids` has columns and rows."""
    best, best_distance = (1, 1), math.inf
    for cols, rows in grids:
        distance = abs(width / height - cols / rows)
        is_filled = height * width > 0.5 * edge**2 * cols * rows
        if distance < best_distance or (distance == best_distance and is_filled):
            best, best_distance = (rows, cols), distance
    return best


def resample_of(own: Mapping[str, Any], default: int, files: ProcessorFiles) -> int:
    """Return Pillow's number of the filter. Raises ModelError."""
    resample = own.get("resample", default)
    if type(resample) is not int or not 0 <= resample < MOST_FILTERS:
        raise ModelError(f"{files.where}: resample is {brief(resample)}, not one of Pillow's filters, 0 to 5")
    return resample
