"""What the engine knows of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.pools.cache_spec import CacheSpec


class Model(Protocol):
    """Shape letters: T tokens, H hidden size, N chosen positions, V vocabulary."""

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Of `weight_bytes`, how many are in what form: `bfloat16`, `8 bits`, `4 bits`."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held, before whatever packing adds."""
        ...

    def cache_specs(self) -> Sequence[CacheSpec]:
        """What each layer keeps, in the order of the layers of `ForwardContext.cache`."""
        ...

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64, each in the vocabulary -> hidden states after the last norm, [T, H]. Writes KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, V] float32."""
        ...
