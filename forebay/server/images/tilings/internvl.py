"""Squares in a grid of about the image's ratio, and all of the image as one more: InternVL.

The filter and the roundings are those of transformers' image processor with Pillow. Its processor cuts every image,
whatever `crop_to_patches` of the file is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.internvl import InternVitConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, closest_grid, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

START: Final = "<img>"
END: Final = "</img>"
BICUBIC: Final = 3  # Pillow's number
MOST_TILES: Final = 64
DEFAULT_TILES: Final = (1, 12)


class GridTiles(Cutting, frozen=True, kw_only=True, tag=True):
    """An image that splits is cut into `min_tiles` to `max_tiles` squares of `tile_size`, and if these are several, all
    of it follows as one more."""

    tile_size: int
    min_tiles: int
    max_tiles: int
    resample: int = BICUBIC

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image, and split it if it `splits`."""
        edge = self.tile_size
        rows, cols = closest_grid(image.height, image.width, edge, self._grids()) if splits else (1, 1)
        whole = image.resize((edge, edge), self.resample).tobytes()
        if rows == cols == 1:
            return Tiles(ONE_TILE, ((edge, edge),), whole)
        resized = image.resize((cols * edge, rows * edge), self.resample)
        corners = [(col * edge, row * edge) for row in range(rows) for col in range(cols)]
        tiles = [resized.crop((left, top, left + edge, top + edge)).tobytes() for left, top in corners]
        return Tiles((rows, cols), ((edge, edge),) * (len(tiles) + 1), b"".join([*tiles, whole]))

    def _grids(self) -> list[tuple[int, int]]:
        sides = range(1, self.max_tiles + 1)
        every = ((cols, rows) for cols in sides for rows in sides)
        return sorted((grid for grid in every if self.min_tiles <= math.prod(grid) <= self.max_tiles), key=math.prod)

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image of these tiles."""
        return f"{START}{image * sum(map(self.num_tokens, sizes))}{END}"

    def written(self, token: str) -> str:
        """Return the token of an image in a line of its own."""
        return f"{token}\n"


def grid_tiles(files: ProcessorFiles, vision: InternVitConfig) -> GridTiles:
    """Read the parameters; where the files say nothing they follow from the encoder. Raises ModelError for parameters
    that the encoder does not fit."""
    own, processor = files.own, files.around
    edge, tokens = vision.image_size, vision.num_tokens(vision.tile_size)
    if (size := own.get("size", {"height": edge, "width": edge})) != {"height": edge, "width": edge}:
        raise ModelError(
            f"{files.where}: size is {brief(size)}; the encoder takes a height and a width of {edge} pixels"
        )
    if (found := processor.get("image_seq_length", tokens)) != tokens:
        raise ModelError(f"{files.where}: image_seq_length is {brief(found)}; the encoder makes {tokens} of a tile")
    least, most = (
        _count(own.get(name, default), name, files)
        for name, default in zip(("min_patches", "max_patches"), DEFAULT_TILES, strict=True)
    )
    if least > most:
        raise ModelError(f"{files.where}: min_patches is {least}, more than the {most} of max_patches")
    return GridTiles(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        tile_size=edge,
        min_tiles=least,
        max_tiles=most,
        resample=resample_of(own, BICUBIC, files),
    )


def _count(value: Any, name: str, files: ProcessorFiles) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TILES:
        raise ModelError(
            f"{files.where}: {name} of the image processor is {brief(value)}, not a whole number to {MOST_TILES}"
        )
    return value
