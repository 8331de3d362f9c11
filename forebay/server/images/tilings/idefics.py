"""Squares of one size, and all of the image as one more: SmolVLM and Idefics 3.

The steps, filters and roundings are those of transformers' image processors of both with Pillow, which are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.siglip import SiglipConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

AROUND: Final = "<fake_token_around_image>"
WHOLE: Final = "<global-img>"
MAX_EDGE: Final = 4096  # pixels that a resized image has at most on a side, as transformers has it
LANCZOS: Final = 1  # Pillow's number
TILES_BY_DEFAULT: Final = 4  # on the longest edge


class SquareTiles(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is resized to `size` (width and height); without a `size`, until its longest edge has `longest_edge`
    pixels. If it `splits`, it is then cut into squares of `tile_size`, followed by the whole image as one more tile."""

    tile_size: int
    longest_edge: int
    size: tuple[int, int] | None = None
    resample: int = LANCZOS
    splits: bool = True

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image, and split it if it `splits`."""
        edge = self.tile_size
        image = image.resize(self.size or fitted(image.size, self.longest_edge), self.resample)
        if not (splits and self.splits):
            return Tiles(ONE_TILE, ((edge, edge),), image.resize((edge, edge), self.resample).tobytes())
        image = image.resize(in_tiles(image.size, edge), self.resample)
        cols, rows = image.width // edge, image.height // edge
        if rows == cols == 1:
            return Tiles(ONE_TILE, ((edge, edge),), image.tobytes())
        corners = ((col * edge, row * edge) for row in range(rows) for col in range(cols))
        tiles = [image.crop((left, top, left + edge, top + edge)).tobytes() for left, top in corners]
        tiles.append(image.resize((edge, edge), self.resample).tobytes())
        return Tiles((rows, cols), ((edge, edge),) * len(tiles), b"".join(tiles))

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text of an image in the prompt, given the rows and columns of its grid."""
        rows, cols = grid
        tile = image * self.num_tokens(sizes[0])
        lines = (
            "".join(f"{AROUND}<row_{row}_col_{col}>{tile}" for col in range(1, cols + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        split = "".join(lines) + "\n" if rows else ""
        return f"{split}{AROUND}{WHOLE}{tile}{AROUND}"


def fitted(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the width and height that have a longest edge of `longest` pixels, the other edge even, and both at most
    `MAX_EDGE`."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)


def in_tiles(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return the width and height as multiples of a tile's edge: the longer one rounded up, the other of the same
    ratio rounded up."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        return width, math.ceil(int(width / ratio) / edge) * edge
    height = math.ceil(height / edge) * edge
    return math.ceil(int(height * ratio) / edge) * edge, height


def squares(files: ProcessorFiles, vision: SiglipConfig) -> SquareTiles:
    """Read the parameters; where the files say nothing they follow from the encoder. Raises ModelError for parameters
    that the encoder does not fit."""
    processor, own = files.around, files.own
    tile_size = _edge(own, "max_image_size", vision.image_size)
    if tile_size != vision.image_size:
        raise ModelError(f"{files.where}: tiles have {tile_size} pixels, and the encoder takes {vision.image_size}")
    per_tile = vision.num_tokens(vision.tile_size)
    if (tokens := processor.get("image_seq_len", per_tile)) != per_tile:
        raise ModelError(f"{files.where}: image_seq_len is {tokens}; the encoder makes {per_tile} of a tile")
    if not own.get("do_resize", True):
        raise ModelError(f"{files.where}: do_resize is false, and images of any size are no prompt: give a size")
    return SquareTiles(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        tile_size=tile_size,
        longest_edge=_edge(own, "size", TILES_BY_DEFAULT * tile_size),
        size=_size(own, files),
        resample=resample_of(own, LANCZOS, files),
        splits=own.get("do_image_splitting", True) is True,
    )


def _edge(own: Mapping[str, Any], name: str, default: int) -> int:
    given = own.get(name) or {}
    edge = given.get("longest_edge", default) if isinstance(given, dict) else None
    if type(edge) is not int or edge < 1:
        raise ModelError(f"{name} of the image processor is {brief(given)}, not an object with longest_edge in pixels")
    return edge


def _size(own: Mapping[str, Any], files: ProcessorFiles) -> tuple[int, int] | None:
    """Return the exact size, None if the file has none or has a longest edge."""
    size = own.get("size") or {}
    if "longest_edge" in size or not {"width", "height"} <= size.keys():
        return None
    width, height = size["width"], size["height"]
    if not all(type(edge) is int and 0 < edge <= MAX_EDGE for edge in (width, height)):
        raise ModelError(f"{files.where}: size is {brief(size)}; its edges must have 1 to {MAX_EDGE} pixels")
    return width, height
