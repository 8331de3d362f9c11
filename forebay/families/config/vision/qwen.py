"""Fields that all encoders of Qwen have. An image of any size is one tile, and squares of patches are its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from forebay.base.errors import ModelError, brief
from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import MAX_LAYERS, MAX_NUMBER, Fields, is_number
from forebay.families.config.vision.base import MAX_TILE, Channels, VisionConfig, check_heads, pixel_numbers

MAX_RATIO: Final = 200
"""Of an image's longer edge to its shorter one: transformers' processor refuses more."""

MOST_TOKENS: Final = 4096
"""Of an image: others wait while a layer of the encoder is computed, and its attention grows with the square."""

_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_PIXELS: Final = 1 << 28

# About how images become tiles, and videos, which are not served.
HARMLESS: Final = frozenset({"temporal_patch_size", "tokens_per_second"})


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenConfig(VisionConfig):
    """Heads are rotated by a patch's row and column with the base `rope_theta`. Each kernel sees `depth` frames, all of
    which are the image. A token becomes `output_size` numbers, as many as the language model's have. Images have
    `min_pixels` to `max_pixels`, and about `MOST_TOKENS` at most."""

    rope_theta: float
    depth: int
    output_size: int
    min_pixels: int
    max_pixels: int

    @property
    def max_edge(self) -> int:
        # Rounding the other edge down, to one token's at least, makes an image up to half as narrow again.
        return math.isqrt(3 * MAX_RATIO * self.max_pixels // 2) + self.token_edge

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of an image: a narrow one has at least a token's edge, and an enlarged one is rounded
        up."""
        edge = self.token_edge
        grown = math.isqrt(MAX_RATIO * self.min_pixels) // edge + 1
        return max(self.max_pixels // edge**2, self.max_edge // edge, self.min_pixels // edge**2 + 2 * grown)

    @property
    def num_mergers(self) -> int:
        """Return how often the patches of a tile are merged to tokens."""
        return 1

    def outer_products(self, output_size: int) -> int:
        """Return the products that a patch takes before and behind the layers."""
        width = self.hidden_size
        merged = self.merge**2 * width * width + width * output_size
        return width * CHANNELS * self.patch_size**2 + self.num_mergers * merged


class QwenValues(TypedDict):
    """The values of a `QwenConfig` but for its widths."""

    kind: str
    placeholder: int
    patch_size: int
    merge: int
    num_layers: int
    num_heads: int
    norm_eps: float
    rescale: float
    mean: Channels
    std: Channels
    rope_theta: float
    depth: int
    min_pixels: int
    max_pixels: int


def common_fields(
    fields: Fields,
    own: Fields,
    processor: Fields,
    vocab_size: int,
    *,
    placeholder: int,
    num_layers: int,
    patch_size: int,
) -> QwenValues:
    """Read the fields of a `QwenConfig` but for its widths; `own` are those of the encoder. Defaults are those of
    transformers' classes; those that types have of their own are given. Raises ModelError."""
    own.only("in_channels", CHANNELS)
    rescale, mean, std = pixel_numbers(processor, mean=_CLIP_MEAN, std=_CLIP_STD)
    size = own.size("patch_size", default=patch_size, most=MAX_TILE)
    merge = own.size("spatial_merge_size", default=2, most=MAX_TILE)
    most = MOST_TOKENS * (size * merge) ** 2
    min_pixels, max_pixels = (min(pixels, most) for pixels in _pixel_range(processor))
    return {
        "kind": str(fields.get("model_type")),
        "placeholder": fields.size("image_token_id", default=placeholder, least=0, most=vocab_size - 1),
        "patch_size": size,
        "merge": merge,
        "num_layers": own.size("depth", default=num_layers, most=MAX_LAYERS),
        "num_heads": own.size("num_heads", default=16),
        "norm_eps": 1e-6,
        "rescale": rescale,
        "mean": mean,
        "std": std,
        "rope_theta": rope_theta(own),
        "depth": own.size("temporal_patch_size", default=2, most=16),
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
    }


def rope_theta(own: Fields) -> float:
    """Read the base of the rotation by row and column. Raises ModelError."""
    rope = own.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") != "axial":
        raise own.wrong("rope_parameters", "an object whose rope_type is axial")
    theta = rope.get("rope_theta", 10_000.0)
    if not is_number(theta) or not 0 < theta <= MAX_NUMBER:
        raise own.wrong("rope_parameters", "an object with a rope_theta above 0")
    return float(theta)


def _pixel_range(processor: Fields) -> tuple[int, int]:
    """The least and the most pixels of an image; older files have them under names of their own."""
    size = processor.get("size") or {}
    if not isinstance(size, dict):
        raise processor.wrong("size", "an object with shortest_edge and longest_edge in pixels of the whole image")
    least = processor.get("min_pixels") or size.get("shortest_edge", _MIN_PIXELS)
    most = processor.get("max_pixels") or size.get("longest_edge", _MAX_PIXELS)
    if not all(type(pixels) is int for pixels in (least, most)) or not 0 < least <= most <= _MOST_PIXELS:
        raise ModelError(
            f"{processor.where}: images have {brief(least)} to {brief(most)} pixels; it must be a range from 1 to "
            f"{_MOST_PIXELS}"
        )
    return int(least), int(most)


def check_sizes(config: QwenConfig, processor: Fields, where: str) -> None:
    """Raise ModelError for sizes that do not fit each other, and for those of an image processor that does not fit."""
    check_heads(config, where)
    if config.hidden_size // config.num_heads % 4:
        raise ModelError(f"{where}: heads of {config.hidden_size // config.num_heads} do not divide into four parts")
    if config.max_pixels < config.token_edge**2:
        raise ModelError(f"{where}: images of at most {config.max_pixels} pixels have no token of {config.token_edge}")
    for name, own in (("patch_size", config.patch_size), ("merge_size", config.merge)):
        given: Any = processor.get(name, own)
        if given != own:
            raise ModelError(f"{processor.where}: {name} is {brief(given)}; the encoder has {own}")


def check_output_size(vision: QwenConfig, hidden_size: int, field: str = "out_hidden_size") -> None:
    """Raise ModelError unless tokens are of the language model's width. `field` is the encoder's field of its own
    width."""
    if vision.output_size != hidden_size:
        raise ModelError(
            f"vision_config has tokens of {vision.output_size} numbers ({field}), and the language model's "
            f"have {hidden_size}"
        )
