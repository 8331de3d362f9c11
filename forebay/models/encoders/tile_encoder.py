"""Encoders whose patches attend to each other within one tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES
from forebay.layers.norms import LayerNormSpec, build_norm
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments


class TileEncoderSpec(Protocol):
    """Patches, blocks, and behind the last one `norm`, None for none, and the connector."""

    @property
    def patches(self) -> Any: ...

    @property
    def blocks(self) -> Sequence[Any]: ...

    @property
    def norm(self) -> LayerNormSpec | None: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def connector(self) -> Any: ...


class TileEncoder(Encoder):
    """The rows of a tile attend to each other; a tile's bits depend on its pixels alone. The first `num_own_rows` rows
    are the tile's own, before those of its patches, and are left out behind the last layer."""

    def __init__(self, spec: TileEncoderSpec, ops: Ops, weights: Weights, *, num_own_rows: int = 0) -> None:
        super().__init__(weights, len(spec.blocks), spec.connector.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps).of
        self._connector = spec.connector.build(parts)
        assert not parts.kept, "an encoder keeps nothing"
        self._size, self._device, self._num_own_rows = spec.patches.size, weights.device, num_own_rows
        self._tile = lru_cache(MOST_SIZES)(self._tile_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        height, width, _ = pixels.shape
        return State(self._patches(pixels), (height // self._size, width // self._size))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, tile = state.x, self._tile(len(state.x))
        for block in self._blocks[first:last]:
            x = block(x, tile)
        return State(x, state.grid)

    def _tile_of(self, num_rows: int) -> PagedKv:
        return segments([num_rows], self._device)

    def finish(self, state: State) -> Tensor:
        """Turn the patches behind the last layer into [tokens of the tile, H]."""
        x = state.x if self._norm is None else self._norm(state.x)
        tokens: Tensor = self._connector(x[self._num_own_rows :], state.grid)
        return tokens
