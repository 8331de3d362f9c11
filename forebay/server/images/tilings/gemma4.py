"""The whole image as one tile of its own ratio, made as large as its tokens allow: Gemma 4.

The steps, filters and roundings are those of transformers' Gemma4ImageProcessorPil.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ModelError
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.gemma4 import ScaledVisionConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3  # Pillow's number
LOW_TOKENS: Final = 70
"""The most tokens of an image whose request wants few: the fewest for which the models were trained."""


class ScaledImage(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is scaled, at about its own ratio, to the largest number of whole tokens within `max_tokens`. Templates
    write the placeholder; the prompt has the image's tokens between the tokens `begin` and `end`."""

    max_tokens: int
    begin: int
    end: int
    resample: int = BICUBIC

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image: if it does not `splits`, to at most `LOW_TOKENS`."""
        most = self.max_tokens if splits else min(LOW_TOKENS, self.max_tokens)
        height, width = scaled((image.height, image.width), self.token_edge, most)
        return Tiles(ONE_TILE, ((height, width),), image.resize((width, height), self.resample).tobytes())

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image, between its begin and its end."""
        return image * self.num_tokens(sizes[0])

    def framed(self, spell: Callable[[int], str]) -> tuple[str, str]:
        """Return the text that templates write for an image, and its replacement with one placeholder."""
        image = spell(self.placeholder)
        return image, f"{spell(self.begin)}{image}{spell(self.end)}"


def scaled(size: Size, edge: int, most: int) -> Size:
    """Return the height and width in multiples of `edge`, for at most `most` tokens of `edge` x `edge` pixels. An image
    whose shorter edge would have less than one token has one there, and all others along the other edge."""
    height, width = size
    factor = math.sqrt(most * edge**2 / (height * width))
    rows, columns = (math.floor(factor * pixels / edge) for pixels in size)
    if rows == 0:
        rows, columns = 1, most
    elif columns == 0:
        rows, columns = most, 1
    return rows * edge, columns * edge


def scaled_image(files: ProcessorFiles, vision: ScaledVisionConfig) -> ScaledImage:
    """Read the parameters. Raises ModelError for wrong ones, and for those that the encoder does not fit."""
    own = files.own
    if not own.get("do_resize", True):
        raise ModelError(f"{files.where}: do_resize is false, and images must be resized to whole tokens: set it true")
    if vision.max_edge < vision.max_tokens * vision.token_edge:
        raise ModelError(
            f"{files.where}: a narrow image of {vision.max_tokens} tokens (max_soft_tokens) has "
            f"{vision.max_tokens * vision.merge} patches on an edge, and there are {vision.num_positions} positions "
            "(position_embedding_size)"
        )
    return ScaledImage(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        max_tokens=vision.max_tokens,
        begin=vision.begin,
        end=vision.end,
        resample=resample_of(own, BICUBIC, files),
    )
