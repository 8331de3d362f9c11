"""Settings and sizes of pictures in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.config.flag import BYTES, Flag

DEFAULT_CACHE_BYTES: Final = 512 << 20

FLAGS: Final = (
    Flag(
        "mm_cache_bytes",
        BYTES,
        "memory for the pixels and the encodings of images, of models that accept images",
        default=DEFAULT_CACHE_BYTES,
        low=1 << 20,
        high=1 << 40,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    """Pictures in the engine: their pixels and encodings together take `mm_cache_bytes`."""

    mm_cache_bytes: int = DEFAULT_CACHE_BYTES


DEFAULT_PICTURES: Final = PictureOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureConfig:
    """Sizes and costs of pictures, for the scheduler: the encoder has `num_layers`, and a layer's work on a tile costs
    as much as `layer_tokens` tokens of a prompt. Encodings have rows 1..`num_rows` of `row_bytes`, in blocks of
    `tokens_per_tile`; they and the pixels together take `cache_bytes`. Tiles have `tile_bytes` of pixels. Ids from
    `vocab_size` on stand for tokens of pictures, of which the model is given the `placeholder`."""

    num_layers: int
    layer_tokens: float
    tokens_per_tile: int
    tile_bytes: int
    num_rows: int
    row_bytes: int
    cache_bytes: int
    vocab_size: int
    placeholder: int
