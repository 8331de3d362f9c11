"""The engine's interface to a model, whatever it computes: a decoder, or an encoder of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forebay.layers.adapters import Adapters, AdapterSlots
from forebay.layers.context import ForwardContext
from forebay.layers.params import Weights
from forebay.models.decoder import DecoderSpec, Model
from forebay.models.shares import check_for_ranks
from forebay.models.text_encoder import TextEncoder, TextEncoderSpec
from forebay.ops import Ops
from forebay.ops.exchange import WHOLE, Share
from forebay.pools.cache_spec import CacheSpec

NetworkSpec = DecoderSpec | TextEncoderSpec


class Network(Protocol):
    """A model with its weights; see `Model` for what its attributes mean."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def generates(self) -> bool:
        """Whether its logits are of tokens, which a decode computes one by one."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> Mapping[str, int]: ...
    @property
    def numbers(self) -> Sequence[float]: ...
    @property
    def adapters(self) -> Adapters | None: ...
    @property
    def mrope(self) -> bool: ...
    @property
    def kept_by_block(self) -> tuple[tuple[CacheSpec, ...], ...]: ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return the cache of each layer, in the order of the `CachePool`'s entries."""
        ...

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> hidden states behind the last layer, [T, H]."""
        ...

    def tapped(self, ctx: ForwardContext, input_ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `forward`, and also the inputs of the layers `taps`, side by side."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, tokens or labels]."""
        ...


def build_network(
    spec: NetworkSpec,
    ops: Ops,
    weights: Weights,
    *,
    num_positions: int,
    first_entry: int = 0,
    adapters: AdapterSlots | None = None,
    share: Share = WHOLE,
) -> Network:
    """Return the model that `spec` describes with its weights, or a rank's share of it; see `Model`. Raises ConfigError
    if it is not built for ranks, or they cannot divide it."""
    if share.size > 1:
        check_for_ranks(spec)
    if isinstance(spec, TextEncoderSpec):
        return TextEncoder(spec, ops, weights, num_positions=num_positions)
    return Model(
        spec, ops, weights, num_positions=num_positions, first_entry=first_entry, adapters=adapters, share=share
    )
