"""The whole image as one tile of its own ratio, never enlarged, with black at the right and at the bottom: Kimi K2.5.

The steps and roundings are those of transformers' image processor, which exists with torchvision alone. Its filter on
bytes is Pillow's but for roundings: a value may differ by 2. The
model's published code has Pillow's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ModelError
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.kimi_k25 import KimiVisionConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3  # Pillow's number
LOW_EDGE: Final = 512
"""An image whose request wants few tokens has as many patches as a square of this edge."""


class PaddedImage(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is made smaller until it has about `max_patches` patches of `patch_size`, and at most `max_side` in a
    row or a column. Its edges are then filled up to whole tokens."""

    patch_size: int
    max_patches: int
    max_side: int
    resample: int = BICUBIC

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image: if it does not `splits`, to about as many patches as a square of `LOW_EDGE` has."""
        most = self.max_patches if splits else min(self.max_patches, max(1, LOW_EDGE // self.patch_size) ** 2)
        height, width = self.scaled((image.height, image.width), most)
        size = self._filled(height), self._filled(width)
        resized = image.resize((width, height), self.resample)
        return Tiles(ONE_TILE, (size,), resized.crop((0, 0, size[1], size[0])).tobytes())

    def scaled(self, size: Size, most: int) -> Size:
        """Return the height and width of an image of at most about `most` patches, before it is filled up."""
        rows, columns = (max(1, edge // self.patch_size) for edge in size)
        longest = self.max_side * self.patch_size
        factor = min(1.0, math.sqrt(most / (rows * columns)), longest / size[0], longest / size[1])
        height, width = (min(max(1, int(edge * factor)), longest) for edge in size)
        return height, width

    def _filled(self, edge: int) -> int:
        return math.ceil(edge / self.token_edge) * self.token_edge

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return a placeholder for each token: the chat template writes the tokens around them."""
        return image * self.num_tokens(sizes[0])

    def written(self, token: str) -> str:
        """Return the token of an image between the tokens that templates write around it."""
        return f"<|media_begin|>image<|media_content|>{token}<|media_end|>"


def padded_image(files: ProcessorFiles, vision: KimiVisionConfig) -> PaddedImage:
    """Read the parameters. Raises ModelError for wrong ones."""
    if not files.own.get("do_resize", True):
        raise ModelError(
            f"{files.where}: do_resize is false, and images must be filled up to whole tokens: set it true"
        )
    return PaddedImage(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        patch_size=vision.patch_size,
        max_patches=vision.most_patches,
        max_side=vision.most_of_a_side,
        resample=resample_of(files.own, BICUBIC, files),
    )
