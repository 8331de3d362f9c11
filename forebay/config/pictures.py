"""Settings and sizes of pictures in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.pixels import Size, num_tokens
from forebay.config.flag import BYTES, PATH, Flag

DEFAULT_CACHE_BYTES: Final = 512 << 20

NO_MMPROJ: Final = "none"
MMPROJ: Final = Flag(
    "mmproj",
    PATH,
    "GGUF file of the vision encoder of a GGUF model; by default the one beside the model with mmproj in its name, of "
    "several the first of F16, BF16, Q8_0 and F32; none serves text alone",
    aliases=("-mm",),
)
OPTIONAL: Final = {"mmproj": "none: there is no file of the model's with mmproj in its name beside it"}

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
    """Pictures in the engine: their pixels and encodings together take `mm_cache_bytes`. `mmproj` is the file of the
    encoder beside a GGUF model."""

    mmproj: str | None = None
    mm_cache_bytes: int = DEFAULT_CACHE_BYTES


DEFAULT_PICTURES: Final = PictureOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureConfig:
    """Sizes and costs of pictures, for the scheduler.

    A token of a tile stands for `token_edge` x `token_edge` pixels. Tiles have the one `tile_size` (height and width).
    If it is None, their edges are multiples of `token_edge` of at most `max_edge` pixels, and they have at most
    `max_tokens`. The encoder has `num_layers`. A layer's work on a tile of n tokens costs as much as n * `token_cost` +
    n * m * `pair_cost` tokens of a prompt. There m is the number of tokens that a token's attention sees: all n, or at
    most the layer's entry in `seen_tokens`.

    Encodings have rows 1..`num_rows` of `row_bytes`, in blocks of `block_rows`; they and the pixels together take
    `cache_bytes`. Ids from `vocab_size` on stand for tokens of pictures. A prompt has the `placeholder` in their place,
    and the model is given the `input_id`. With `mrope` a picture is one run of tokens in a grid, whose rows and columns
    are rotary positions.

    Attention within a run of a picture's tokens is in both directions if there is a `longest_span`, the most tokens
    that a run may have; 0: it is causal.
    """

    num_layers: int
    token_edge: int
    tile_size: Size | None
    max_edge: int
    max_tokens: int
    token_cost: float
    pair_cost: float
    block_rows: int
    num_rows: int
    row_bytes: int
    cache_bytes: int
    vocab_size: int
    placeholder: int
    input_id: int
    seen_tokens: tuple[int, ...] = ()
    longest_span: int = 0
    mrope: bool = False

    def takes(self, size: Size) -> bool:
        """Return whether the encoder takes tiles of this size."""
        if self.tile_size is not None:
            return size == self.tile_size
        whole = all(0 < edge <= self.max_edge and edge % self.token_edge == 0 for edge in size)
        return whole and self.num_tokens(size) <= self.max_tokens

    def num_tokens(self, size: Size) -> int:
        """Return the number of tokens of a tile, each a row of its encoding."""
        return num_tokens(size, self.token_edge)

    def layer_tokens(self, size: Size, layers: range) -> float:
        """Return how many tokens of a prompt cost as much as the work of these layers on a tile."""
        count = self.num_tokens(size)
        return sum(self._layer_cost(count, layer) for layer in layers)

    def layers_within(self, size: Size, first: int, budget: float) -> range:
        """Return the layers from `first` on whose work on a tile costs no more than `budget`: one at least."""
        count, cost = self.num_tokens(size), 0.0
        for layer in range(first, self.num_layers):
            cost += self._layer_cost(count, layer)
            if cost > budget and layer > first:
                return range(first, layer)
        return range(first, self.num_layers)

    def _layer_cost(self, count: int, layer: int) -> float:
        seen = min(count, self.seen_tokens[layer]) if self.seen_tokens else count
        return count * (self.token_cost + seen * self.pair_cost)
