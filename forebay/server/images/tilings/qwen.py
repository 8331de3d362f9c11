"""The whole image as one tile, of its own ratio: Qwen's.

The steps, filters and roundings are those of transformers' Qwen2VLImageProcessorPil.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.qwen import MAX_RATIO, QwenConfig
from forebay.server.images.sources import Unreadable
from forebay.server.images.tilings.base import Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3  # Pillow's number
LOW_PIXELS: Final = 512 * 512
"""The most pixels of an image whose request wants few tokens."""


class FittedImage(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is resized to edges that are multiples of `token_edge`, with about its own ratio and `min_pixels` to
    `max_pixels`."""

    min_pixels: int
    max_pixels: int
    resample: int = BICUBIC

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image: if it does not `splits`, to at most `LOW_PIXELS`. Raises Unreadable for one that is too
        narrow."""
        most = self.max_pixels if splits else max(self.min_pixels, min(LOW_PIXELS, self.max_pixels))
        height, width = fitted((image.height, image.width), self.token_edge, self.min_pixels, most)
        pixels = image.resize((width, height), self.resample).tobytes()
        return Tiles((height // self.token_edge, width // self.token_edge), ((height, width),), pixels)

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return a placeholder for each token: the chat template writes the tokens around them."""
        return image * sum(map(self.num_tokens, sizes))

    def written(self, token: str) -> str:
        """Return the token of an image between the tokens that templates write around it."""
        return f"<|vision_start|>{token}<|vision_end|>"


def fitted(size: Size, edge: int, least: int, most: int) -> Size:
    """Return the height and width in multiples of `edge`, with `least` to `most` pixels. Raises Unreadable if one is
    more than `MAX_RATIO` times the other."""
    height, width = size
    if max(size) > MAX_RATIO * min(size):
        raise Unreadable(
            f"has {width} x {height} pixels: one edge may have at most {MAX_RATIO} times as many as the other; send a "
            "wider or a shorter one"
        )
    rounded = round(height / edge) * edge, round(width / edge) * edge
    if rounded[0] * rounded[1] > most:
        shrink = math.sqrt(height * width / most)
        height, width = (max(edge, math.floor(pixels / shrink / edge) * edge) for pixels in size)
    elif rounded[0] * rounded[1] < least:
        grow = math.sqrt(least / (height * width))
        height, width = (math.ceil(pixels * grow / edge) * edge for pixels in size)
    else:
        height, width = rounded
    return height, width


def fitted_image(files: ProcessorFiles, vision: QwenConfig) -> FittedImage:
    """Read the parameters; where the files say nothing they are those of transformers' class. Raises ModelError."""
    return FittedImage(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        min_pixels=vision.min_pixels,
        max_pixels=vision.max_pixels,
        resample=resample_of(files.own, BICUBIC, files),
    )
