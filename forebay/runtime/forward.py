"""What steps of every shape do alike: the model over the pools, and the most likely tokens.

Shape letters: T tokens, S sequences, N chosen positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.models.decoder import Model
from forebay.ops import Ops
from forebay.ops.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.runtime.kinds import Columns, KindTokens, of_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of all sequences, one sequence after the other, on the device."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    req_pool_indices: Tensor  # [S] int32
    q_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    out_cache_loc: Tensor  # [T] int64
    kinds: KindTokens

    @classmethod
    def of(cls, columns: Columns, **others: Any) -> Self:
        """Each field from the column of its name, but for `others`."""
        found: dict[str, Any] = {f.name: columns[f.name] for f in fields(cls) if f.name not in others}
        return cls(**found, **others)


class HiddenStates(NamedTuple):
    hidden: Tensor  # [T, H]
    finite: Tensor  # [T] bool


class GreedyTokens(NamedTuple):
    """`token_ids` [N] int64 are the most likely, and stand in `last_tokens` already; 0 where not `finite` [N] bool.
    `logits` [N, V] float32."""

    token_ids: Tensor
    finite: Tensor
    logits: Tensor


class Forward:
    def __init__(self, model: Model, ops: Ops, rows: RequestRows, cache: CachePool) -> None:
        self.model, self.ops, self.rows, self.cache = model, ops, rows, cache

    def context(self, tokens: StepTokens) -> ForwardContext:
        """What the layers are told of a step."""
        full = PagedKv(
            page_table=self.rows.req_to_token,
            rows=tokens.req_pool_indices,
            q_start=tokens.q_start,
            seq_lens=tokens.seq_lens,
            page_size=self.cache.page_size,
            out_cache_loc=tokens.out_cache_loc,
        )
        others = of_layers(self.cache, full, tokens.kinds)
        return ForwardContext(positions=tokens.positions, full=full, cache=self.cache, **others)

    def hidden(self, tokens: StepTokens) -> HiddenStates:
        """Of each token, and whether it is a number at all."""
        hidden = self.model.forward(self.context(tokens), tokens.input_ids)
        return HiddenStates(hidden, self.ops.finite_rows(hidden))

    def decode(self, tokens: StepTokens) -> GreedyTokens:
        """Of sequences of one token each: its successor."""
        return self.greedy(self.model.forward(self.context(tokens), tokens.input_ids), tokens.req_pool_indices)

    def greedy(self, hidden: Tensor, rows: Tensor) -> GreedyTokens:
        """hidden [N, H] of the last tokens of `rows` [N] int32."""
        logits = self.model.logits(hidden)
        token_ids, finite = self.ops.argmax_rows(logits)
        self.ops.scatter(self.rows.last_tokens, rows, token_ids)
        return GreedyTokens(token_ids, finite, logits)
