"""Encoders of pictures: a tile of pixels to rows of a language model's embedding.

Its layers run in slices, between which the state of a tile is kept: a step that decodes may so run a few of them at a
time. A tile's bits do not depend on the slices, nor on tiles encoded before.

Shape letters: P patches of a tile, h hidden size of the encoder, H of the language model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from forebay.layers.params import Weights
from forebay.ops import Ops


class State(NamedTuple):
    """A tile between two layers: `x` [P, h], of `grid` rows and columns of patches, and `features` of its tokens
    [tokens, H] that are done."""

    x: Tensor
    grid: tuple[int, int]
    features: tuple[Tensor, ...] = ()


class Encoder(ABC):
    """Encodes one tile at a time: `begin`, all `layers` in any slices, `finish`. None of them changes its arguments.

    A token has `row_size` numbers, of which the first are its embedding.
    """

    def __init__(self, weights: Weights, num_layers: int, row_size: int) -> None:
        self.dtype, self.num_layers, self.row_size = weights.dtype, num_layers, row_size
        self._held_bytes = weights.held_bytes

    @property
    def weight_bytes(self) -> int:
        return sum(self._held_bytes.values())

    @abstractmethod
    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""

    @abstractmethod
    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""

    @abstractmethod
    def finish(self, state: State) -> Tensor:
        """Turn the state behind the last layer into [tokens of the tile, row_size], row by row of the tile."""


class EncoderSpec(Protocol):
    """A description of an encoder under the names of its files."""

    def build(self, ops: Ops, weights: Weights) -> Encoder:
        """Return the encoder with its weights."""

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line: x is a patch's stream, and in the end a token's embedding."""
