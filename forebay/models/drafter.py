"""The runtime's interface to models that draft from hidden states of the target model.

Shape letters: T tokens, H numbers of a token that it gives, F numbers that it is fed with, N chosen tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.models.decoder import Model
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec


class Drafter(Protocol):
    """A draft model. The weights are read-only, and it keeps nothing of a step but KV, in layers behind the model's."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def seen_size(self) -> int:
        """F."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states of the target model that it reads, see `Model.tapped`."""
        ...

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache that it keeps beside `Model.cache_specs`, behind these."""
        ...

    @property
    def num_layers(self) -> int:
        """Return the number of the cache's last layers that are its own, of KV."""
        ...

    def follow(self, ctx: ForwardContext, next_ids: Tensor, seen: Tensor) -> Tensor:
        """seen [T, F] and next_ids [T] int64 -> hidden states [T, H], which predict those of the model for next_ids.
        `seen` is the model's output for the tokens at the context's positions; next_ids are the tokens behind them.
        Writes KV."""
        ...

    def draft(self, ctx: ForwardContext, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """Continue from hidden [T, H] of `follow` or of this method."""
        ...

    def token_ids(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> the most likely next tokens, [N] int64; any token of the vocabulary if it is not finite."""
        ...


class OwnHead:
    """The draft head (MTP, NextN) that a model was loaded with."""

    taps: tuple[int, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()

    def __init__(self, model: Model, ops: Ops) -> None:
        self._model, self._ops = model, ops
        self.dtype, self.hidden_size, self.seen_size = model.dtype, model.draft_size, model.draft_size
        self.num_layers = len(model.kept_by_block[-1])

    def follow(self, ctx: ForwardContext, next_ids: Tensor, seen: Tensor) -> Tensor:
        """As `Drafter.follow`; `seen` [T, H] are the model's hidden states, or its residual streams."""
        return self._model.draft(ctx, next_ids, seen)

    def draft(self, ctx: ForwardContext, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """As `Drafter.draft`, by one pass of the model's own head."""
        return self._model.draft(ctx, next_ids, hidden)

    def token_ids(self, hidden: Tensor) -> Tensor:
        """As `Drafter.token_ids`, by the model's own head of logits."""
        return self._ops.sampling.argmax_rows(self._model.logits(self._model.joined(hidden)))[0]
