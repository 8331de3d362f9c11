"""Tiles of any ratio: LFM2-VL. A large image is cut into squares, behind which all of it follows, smaller.

The steps and roundings are those of transformers' image processor, which exists with torchvision alone. Its filter on
bytes is Pillow's but for roundings: a value may differ by 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.siglip2 import DEFAULT_MAX_TOKENS, DEFAULT_TILE_SIZE, Siglip2Config
from forebay.server.images.sources import Unreadable
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, closest_grid, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

START: Final = "<|image_start|>"
END: Final = "<|image_end|>"
WHOLE: Final = "<|img_thumbnail|>"
BILINEAR: Final = 2  # Pillow's number
MOST_TILES: Final = 64
DEFAULT_TILES: Final = (2, 10)
DEFAULT_MIN_TOKENS: Final = 64
DEFAULT_TOLERANCE: Final = 2.0


class FlexTiles(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is resized to `min_tokens` to `max_tokens`. An image that `splits` is large if it would have more than
    `tolerance` times the latter. It is then cut into `min_tiles` to `max_tiles` squares of `tile_size`. With
    `thumbnail` all of it follows as one more. With `marks` there are tokens around it and before each of its tiles."""

    patch_size: int
    tile_size: int
    min_tokens: int
    max_tokens: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    resample: int = BILINEAR
    splits: bool = True
    thumbnail: bool = True
    marks: bool = True

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image, and split it if it `splits`. Raises Unreadable for one that is too long for its
        width."""
        whole = self._resized(image)
        if not (splits and self.splits and self._is_large(image.height, image.width)):
            return Tiles(ONE_TILE, ((whole.height, whole.width),), whole.tobytes())
        rows, cols = self.grid(image.height, image.width)
        edge = self.tile_size
        image = image.resize((cols * edge, rows * edge), self.resample)
        corners = [(col * edge, row * edge) for row in range(rows) for col in range(cols)]
        tiles = [image.crop((left, top, left + edge, top + edge)) for left, top in corners]
        if self.thumbnail and len(tiles) > 1:
            tiles.append(whole)
        sizes = tuple((tile.height, tile.width) for tile in tiles)
        return Tiles((rows, cols) if len(tiles) > 1 else ONE_TILE, sizes, b"".join(tile.tobytes() for tile in tiles))

    def _resized(self, image: Image) -> Image:
        height, width = self.whole(image.height, image.width)
        most = max(self.max_tokens, self.num_tokens((self.tile_size, self.tile_size)))
        if (count := self.num_tokens((height, width))) > most:
            raise Unreadable(
                f"has {image.width} x {image.height} pixels, of which {count} tokens would be made; the encoder takes "
                f"at most {most} at once: crop it to a smaller ratio"
            )
        return image.resize((width, height), self.resample)

    def whole(self, height: int, width: int) -> Size:
        """Return the size of an image that is not split: multiples of a token's edge, of about its ratio."""
        edge = self.token_edge
        resized = tuple(max(edge, round(length / edge) * edge) for length in (height, width))
        most, least = self.max_tokens * edge**2, self.min_tokens * edge**2
        if math.prod(resized) > most:
            ratio = math.sqrt(height * width / most)
            resized = tuple(max(edge, math.floor(length / ratio / edge) * edge) for length in (height, width))
        elif math.prod(resized) < least:
            ratio = math.sqrt(least / (height * width))
            resized = tuple(math.ceil(length * ratio / edge) * edge for length in (height, width))
        return resized[0], resized[1]

    def _is_large(self, height: int, width: int) -> bool:
        """Whether the image has too many pixels for one tile. An edge counts as a patch's at least."""
        edge = self.token_edge
        rounded = (max(self.patch_size, round(length / edge) * edge) for length in (height, width))
        return math.prod(rounded) > self.max_tokens * edge**2 * self.tolerance

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles whose ratio is closest to the image's; of two that are equally close,
        the larger one if the image has more than half of its pixels."""
        return closest_grid(height, width, self.tile_size, self._grids())

    def _grids(self) -> list[tuple[int, int]]:
        sides = range(1, self.max_tiles + 1)
        every = ((cols, rows) for cols in sides for rows in sides)
        fitting = {grid for grid in every if self.min_tiles <= math.prod(grid) <= self.max_tiles}
        return sorted(fitting, key=math.prod)

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image of these tiles."""
        tiles = (image * self.num_tokens(size) for size in sizes)
        if not self.marks:
            return "".join(tiles)
        marked = (mark + tile for mark, tile in zip(self._marks(grid), tiles, strict=False))
        return f"{START}{''.join(marked)}{END}"

    def _marks(self, grid: tuple[int, int]) -> Iterator[str]:
        rows, cols = grid
        if grid == ONE_TILE:
            yield ""
            return
        for row in range(1, rows + 1):
            yield from (f"<|img_row_{row}_col_{col}|>" for col in range(1, cols + 1))
        yield WHOLE


def flex(files: ProcessorFiles, vision: Siglip2Config) -> FlexTiles:
    """Read the parameters. Raises ModelError for wrong ones, and for those that the encoder does not fit."""
    own, processor = files.own, files.around
    tile_size = _number(own, "tile_size", DEFAULT_TILE_SIZE, files)
    if tile_size % vision.token_edge:
        raise ModelError(
            f"{files.where}: tiles have {tile_size} pixels, which are no multiple of the {vision.token_edge} of a token"
        )
    for name, ours in (("encoder_patch_size", vision.patch_size), ("downsample_factor", vision.merge)):
        if (given := own.get(name, ours)) != ours:
            raise ModelError(f"{files.where}: {name} is {brief(given)}; the encoder has {ours}")
    min_tiles, max_tiles = (
        _number(own, name, default, files, MOST_TILES)
        for name, default in zip(("min_tiles", "max_tiles"), DEFAULT_TILES, strict=True)
    )
    if min_tiles > max_tiles:
        raise ModelError(f"{files.where}: min_tiles is {min_tiles}, more than the {max_tiles} of max_tiles")
    tolerance = own.get("max_pixels_tolerance", DEFAULT_TOLERANCE)
    if type(tolerance) not in (int, float) or not 0 < tolerance < math.inf:
        raise ModelError(f"{files.where}: max_pixels_tolerance is {brief(tolerance)}, not a number above 0")
    return FlexTiles(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        patch_size=vision.patch_size,
        tile_size=tile_size,
        min_tokens=_number(own, "min_image_tokens", DEFAULT_MIN_TOKENS, files),
        max_tokens=_number(own, "max_image_tokens", DEFAULT_MAX_TOKENS, files),
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        tolerance=tolerance,
        resample=resample_of(own, BILINEAR, files),
        splits=own.get("do_image_splitting", True) is True and (min_tiles, max_tiles) != (1, 1),
        thumbnail=own.get("use_thumbnail", True) is True,
        marks=processor.get("use_image_special_tokens", True) is True,
    )


def _number(own: Mapping[str, Any], name: str, default: int, files: ProcessorFiles, most: int = 1 << 16) -> int:
    value = own.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(
            f"{files.where}: {name} of the image processor is {brief(value)}, not a whole number to {most}"
        )
    return value
