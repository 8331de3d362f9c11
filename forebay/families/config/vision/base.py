"""Fields that every encoder of pictures has, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS, Size, num_tokens
from forebay.families.base.fields import Fields, is_number

Channels = tuple[float, float, float]
"""A number for each channel of a pixel, red first."""

MAX_TILE: Final = 4096  # pixels of an edge
MAX_TILE_BYTES: Final = 64 << 20  # the process that decodes images answers with at most twice as many
HALVES: Final = (0.5, 0.5, 0.5)
# How names of tensors begin in published files of some models, and in those of transformers 5.
_PUBLISHED: Final = (
    ("vision_tower.", "model.vision_tower."),
    ("visual.", "model.visual."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("model.vision_embedder.", "model.embed_vision."),
)
_POOLING: Final = "model.vision_tower.head."  # makes one vector of a tile


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The encoder beside a language model, of a `kind`: the type of the model around both.

    A tile of pixels is cut into patches of `patch_size`; what fills no patch is left out. `merge` squared patches
    become one token of the prompt, whose id there is `placeholder`. A pixel's channels are multiplied by `rescale`, and
    then have `mean` and the deviation `std`. Each kind has a class of its own, with its own fields.
    """

    kind: str
    placeholder: int
    patch_size: int
    merge: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    rescale: float = 1 / 255
    mean: Channels = HALVES
    std: Channels = HALVES

    @property
    def token_edge(self) -> int:
        """Return the pixels on an edge of what becomes one token."""
        return self.patch_size * self.merge

    @property
    def tile_size(self) -> Size | None:
        """Return the size that all tiles have, None where their edges are multiples of `token_edge`."""
        return None

    @property
    def max_edge(self) -> int:
        """Return the most pixels on an edge of a tile."""
        return MAX_TILE

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a tile."""
        return self.num_tokens((self.max_edge, self.max_edge))

    @property
    def max_patches(self) -> int:
        """Return the most patches of a tile."""
        return self.max_tokens * self.merge**2

    def num_tokens(self, size: Size) -> int:
        """Return the number of tokens of a tile."""
        return num_tokens(size, self.token_edge)

    def here(self, stored: str) -> str:
        """Return what transformers 5 calls a tensor of the encoder, by its name in the files; empty for one without a
        use."""
        for begin, ours in _PUBLISHED:
            stored = ours + stored.removeprefix(begin) if stored.startswith(begin) else stored
        return "" if stored.startswith(_POOLING) else stored

    @property
    def input_id(self) -> int:
        """Return the id that the language model is given in the place of a token of an image."""
        return self.placeholder

    @property
    def longest_span(self) -> int:
        """Return the most tokens of a prompt between which attention is in both directions, 0 if it is causal."""
        return 0

    @property
    def seen_tokens(self) -> tuple[int, ...]:
        """Return for each layer the most tokens of a tile to which one of them attends. Empty: in each layer to all."""
        return ()

    @property
    def tiles(self) -> str:
        """Return the sizes of tiles in words."""
        if self.tile_size is None:
            edge = self.token_edge
            return f"tiles of up to {self.max_tokens:,} tokens, one for each {edge} x {edge} pixels"
        height, width = self.tile_size
        return f"tiles of {height} x {width} pixels, {self.num_tokens(self.tile_size)} tokens each"

    @property
    def heads_width(self) -> int:
        """Return the numbers of a patch in all heads together."""
        return self.hidden_size

    @property
    def layer_products(self) -> tuple[int, int]:
        """Return the products that a layer takes for a patch in its matrices, and for a pair of patches in its
        attention."""
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size, 2 * self.hidden_size

    def outer_products(self, output_size: int) -> float:
        """Return the products that a patch takes before and behind the layers, where a token becomes as many numbers
        as `output_size`."""
        return self.hidden_size * (CHANNELS * self.patch_size**2 + output_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SquareTileConfig(VisionConfig):
    """An encoder whose tiles are squares of `image_size` pixels."""

    image_size: int

    @property
    def tile_size(self) -> Size:
        return self.image_size, self.image_size

    @property
    def max_edge(self) -> int:
        return self.image_size

    @property
    def side(self) -> int:
        """Return the number of patches in a row and in a column of a tile."""
        return self.image_size // self.patch_size


Vision = tuple[VisionConfig, tuple[str, ...]]
"""An encoder, and the fields of its configuration that nobody knows here."""


def check_heads(config: VisionConfig, where: str) -> None:
    """Raise ModelError unless the hidden size divides into heads."""
    if config.hidden_size % config.num_heads:
        raise ModelError(f"{where}: {config.hidden_size} dimensions do not divide into {config.num_heads} heads")


def check_tile_bytes(config: VisionConfig, where: str) -> None:
    """Raise ModelError if the pixels of a tile may take more than `MAX_TILE_BYTES`."""
    edge = config.token_edge
    if config.max_tokens * edge**2 * CHANNELS > MAX_TILE_BYTES:
        raise ModelError(
            f"{where}: images of {config.max_tokens} tokens of {edge} x {edge} pixels are too large: at most "
            f"{MAX_TILE_BYTES} bytes of an image are encoded"
        )


def pixel_numbers(
    processor: Fields, mean: Channels = HALVES, std: Channels = HALVES
) -> tuple[float, Channels, Channels]:
    """Return the factor of pixels, and then their mean and deviation: `mean` and `std` if the file has none."""
    rescale = processor.number("rescale_factor", default=1 / 255)
    if not processor.flag("do_rescale", default=True):
        rescale = 1.0
    if not processor.flag("do_normalize", default=True):
        return rescale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return rescale, _channels(processor, "image_mean", mean, 0.0), _channels(processor, "image_std", std, 1e-6)


def _channels(processor: Fields, name: str, default: Channels, least: float) -> Channels:
    value = processor.get(name, default)
    numbers = [value] * 3 if is_number(value) else value
    if not isinstance(numbers, list | tuple) or len(numbers) != 3:
        raise processor.wrong(name, "a number for each of three channels")
    if not all(is_number(number) and least <= number <= 1e6 for number in numbers):
        raise processor.wrong(name, f"three numbers of at least {least:g}")
    red, green, blue = map(float, numbers)
    return red, green, blue
