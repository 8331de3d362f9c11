"""One square of one size, whatever the image's shape: Gemma 3.

The filter and the rounding are those of transformers' image processor with Pillow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import Size
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.gemma3 import PooledSiglipConfig
from forebay.server.images.tilings.base import ONE_TILE, Cutting, Tiles, resample_of

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR: Final = 2  # Pillow's number


class WholeSquare(Cutting, frozen=True, kw_only=True, tag=True):
    """An image is resized to a square of `edge` pixels. Templates write the token `begin`. The prompt has the image's
    tokens between the tokens `begin` and `end`, with an empty line before and after."""

    edge: int
    begin: int
    end: int
    resample: int = BILINEAR

    def cut(self, image: Image, *, splits: bool) -> Tiles:
        """Resize an RGB image."""
        edge = self.edge
        return Tiles(ONE_TILE, ((edge, edge),), image.resize((edge, edge), self.resample).tobytes())

    def text_of(self, grid: tuple[int, int], sizes: tuple[Size, ...], image: str) -> str:
        """Return the text that stands for an image, between its begin and its end."""
        return image * self.num_tokens(sizes[0])

    def framed(self, spell: Callable[[int], str]) -> tuple[str, str]:
        """Return the text that templates write for an image, and its replacement with one placeholder."""
        begin = spell(self.begin)
        return begin, f"\n\n{begin}{spell(self.placeholder)}{spell(self.end)}\n\n"


def whole_square(files: ProcessorFiles, vision: PooledSiglipConfig) -> WholeSquare:
    """Read the parameters; where the files say nothing they follow from the encoder. Raises ModelError for parameters
    that the encoder does not fit, and for images that are cut into crops."""
    processor, own = files.around, files.own
    edge, tokens = vision.image_size, vision.longest_span
    if own.get("do_pan_and_scan"):
        raise ModelError(
            f"{files.where}: do_pan_and_scan is true, and images in several crops are not served: set it false"
        )
    if not own.get("do_resize", True):
        raise ModelError(f"{files.where}: do_resize is false, and the encoder takes tiles of {edge} pixels alone")
    if (size := own.get("size", {"height": edge, "width": edge})) != {"height": edge, "width": edge}:
        raise ModelError(
            f"{files.where}: size is {brief(size)}; the encoder takes a height and a width of {edge} pixels"
        )
    if (found := processor.get("image_seq_length", tokens)) != tokens:
        raise ModelError(f"{files.where}: image_seq_length is {brief(found)}; the encoder makes {tokens} of an image")
    return WholeSquare(
        placeholder=vision.placeholder,
        token_edge=vision.token_edge,
        edge=edge,
        begin=vision.begin,
        end=vision.end,
        resample=resample_of(own, BILINEAR, files),
    )
