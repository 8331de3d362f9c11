"""The whole image as one tile in whole tokens, with the ratio that is closest to its own: Muse Glimmer.

The steps and roundings are those of transformers' image processor, which exists with torchvision alone. Its filter on
bytes is Pillow's but for roundings: a value may differ by 1.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ModelError
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.muse_glimmer import MuseVisionConfig
from forebay.server.images.sources import Unreadable
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

LANCZOS: Final = 1  # Pillow's number
START: Final = "<|image_start|>"
END: Final = "<|image_end|>"
LOW_EDGE: Final = 512
"""An image whose request wants few tokens has as many as a square of this edge."""


class ClosestImage(Cutting, frozen=True, kw_only=True, tag=True):
    """An image of more than `max_tokens` is made smaller. Of the numbers of rows and columns of tokens around its own,
    those are taken whose ratio is closest."""

    max_tokens: int
    resample: int = LANCZOS

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image: if it does not `splits`, to as many tokens as a square of `LOW_EDGE` has. Raises
        Unreadable for one that is too narrow."""
        most = self.max_tokens if splits else min(self.max_tokens, max(1, LOW_EDGE // self.token_edge) ** 2)
        height, width = closest((image.height, image.width), self.token_edge, most)
        return Tiles(ONE_TILE, ((height, width),), image.resize((width, height), self.resample).tobytes())

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return a placeholder for each token between two marks."""
        return f"{START}{image * self.num_tokens(sizes[0])}{END}"


def closest(size: Size, edge: int, most: int) -> Size:
    """Return the height and width in multiples of `edge`, for at most `most` tokens of `edge` x `edge` pixels. Raises
    Unreadable for an image so narrow that it would have more.

    Two grids may be equally close, as those of a square are. The first one of a set is then taken, as in transformers:
    the order of a set of pairs of whole numbers depends on the numbers alone.
    """
    height, width = size
    rows, columns = height / edge, width / edge
    if rows * columns > most:
        ratio = columns / rows
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    around = [[math.floor(count), math.ceil(count)] for count in (rows, columns)]
    grids = [grid for grid in set(product(*around)) if min(grid) >= 1 and math.prod(grid) <= most]
    if not grids:
        raise Unreadable(
            f"has {width} x {height} pixels: in tokens of {edge} pixels it would have more than the {most} of an "
            "image; send a wider or a shorter one"
        )
    found = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
    return found[0] * edge, found[1] * edge


def closest_image(files: ProcessorFiles, vision: MuseVisionConfig) -> ClosestImage:
    """Read the parameters. Raises ModelError for wrong ones."""
    if not files.own.get("do_resize", True):
        raise ModelError(f"{files.where}: do_resize is false, and images must be resized to whole tokens: set it true")
    return ClosestImage(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        max_tokens=vision.most_tokens,
        resample=resample_of(files.own, LANCZOS, files),
    )
