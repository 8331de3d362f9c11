"""The whole image as one tile, of any ratio: Mistral 3. Its rows of tokens end with a token of their own.

The steps, filters and roundings are those of transformers' image processor of Pixtral with Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.pixtral import PixtralConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

BREAK: Final = "[IMG_BREAK]"
END: Final = "[IMG_END]"
BICUBIC: Final = 3  # Pillow's number
LOW_EDGE: Final = 512  # pixels on the longest edge of an image of low detail


class WholeImage(Cutting, frozen=True, kw_only=True, tag=True):
    """An image whose edges have more pixels than `max_size` (height and width) is resized to it, keeping its ratio.
    Edges are then rounded up to whole tokens. A row of tokens ends with `line_end`, and the last one with `end`."""

    max_size: Size
    resample: int = BICUBIC
    line_end: str = BREAK
    end: str = END

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image. If it does not `splits`, its longest edge has at most `LOW_EDGE` pixels."""
        most = self.max_size if splits else (min(LOW_EDGE, self.max_size[0]), min(LOW_EDGE, self.max_size[1]))
        height, width = self.fitted((image.height, image.width), most)
        return Tiles(ONE_TILE, ((height, width),), image.resize((width, height), self.resample).tobytes())

    def fitted(self, size: Size, most: Size) -> Size:
        """Return the height and width of the tile that an image becomes. An edge has at least one token."""
        height, width = size
        ratio = max(height / most[0], width / most[1])
        if ratio > 1:
            height, width = (max(1, math.floor(edge / ratio)) for edge in size)
        return self._rounded(height), self._rounded(width)

    def _rounded(self, edge: int) -> int:
        return math.ceil(edge / self.token_edge) * self.token_edge

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image of this one tile."""
        ((height, width),) = sizes
        line = image * (width // self.token_edge)
        return (line + self.line_end) * (height // self.token_edge - 1) + line + self.end


def whole_image(files: ProcessorFiles, vision: PixtralConfig) -> WholeImage:
    """Read the parameters. Raises ModelError for wrong ones, and for those that the encoder does not fit."""
    own, processor = files.own, files.around
    max_size = _max_size(own, vision.image_size, files)
    if max(max_size) > vision.max_edge:
        raise ModelError(
            f"{files.where}: images have up to {max(max_size)} pixels, and the encoder takes {vision.max_edge}"
        )
    for name, ours in (("patch_size", vision.patch_size), ("spatial_merge_size", vision.merge)):
        if (given := processor.get(name, ours)) != ours:
            raise ModelError(f"{files.where}: {name} of the processor is {brief(given)}; the encoder has {ours}")
    marks = {name: processor.get(name, mark) for name, mark in (("image_break_token", BREAK), ("image_end_token", END))}
    for name, mark in marks.items():
        if not isinstance(mark, str):
            raise ModelError(f"{files.where}: {name} is {brief(mark)}, not a token")
    return WholeImage(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        max_size=max_size,
        resample=resample_of(own, BICUBIC, files),
        line_end=marks["image_break_token"],
        end=marks["image_end_token"],
    )


def _max_size(own: Mapping[str, Any], default: int, files: ProcessorFiles) -> Size:
    size = own.get("size") or {"longest_edge": default}
    edges = size if isinstance(size, dict) else {}
    height, width = (edges.get("longest_edge") or edges.get(name) for name in ("height", "width"))
    if type(height) is not int or type(width) is not int or min(height, width) < 1:
        raise ModelError(
            f"{files.where}: size is {brief(size)}, without a longest_edge or a height and a width in pixels"
        )
    return height, width
