"""Parts that steps of every shape share: the places of tokens, the model over the pools, and the most likely tokens.

Shape letters: T tokens, S sequences, N chosen positions, V vocabulary, H hidden size, F entries of a proposer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from forebay.layers.context import ForwardContext, PictureRows
from forebay.memory.kv_allocator import KV
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange
from forebay.ops.reference.accept import Known
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.steps import Pages, Placement
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.build import make_device_kinds
from forebay.runtime.kinds.kind import Columns
from forebay.runtime.steps.pictures import Encodings

FAILED: Final = -1  # instead of a token id, where the logits were not finite


class Batch(NamedTuple):
    """The sequences of a step: their rows [S] int32, and where the tokens of each begin and end, q_start [S + 1]
    int32."""

    rows: Tensor
    q_start: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of all sequences, one sequence after the other, on the device. `kinds` are the inputs of the kinds of
    cache, by name; empty in steps of draft models and heads. `encoded_rows` and `ahead` are `rows` and `ahead` of
    `PictureRows`; None in steps without pictures. `rope_positions` are given as to `StepOps.rope_positions`."""

    input_ids: Tensor  # [T] int64
    batch: Batch
    placed: Placement
    kinds: Mapping[str, Any] = field(default_factory=dict)
    encoded_rows: Tensor | None = None  # [T] int32
    ahead: Tensor | None = None  # [T] int32
    rope_positions: Tensor | None = None  # [T, 3] int64


class HiddenStates(NamedTuple):
    hidden: Tensor  # [T, H]
    finite: Tensor  # [T] bool
    seen: Tensor  # [T, F]: what a proposer goes on from, the hidden states or what it taps


class GreedyTokens(NamedTuple):
    """`token_ids` [N] int64 are the most likely; 0 for each that is not `finite` [N] bool. `logits` [N, V] float32."""

    token_ids: Tensor
    finite: Tensor
    logits: Tensor

    def or_failed(self) -> Tensor:
        """The tokens, FAILED for each that is not finite."""
        return torch.where(self.finite, self.token_ids, FAILED)


class Decoded(NamedTuple):
    """The tokens that decodes choose behind each of their tokens, as in `GreedyTokens`, and the input of a proposer."""

    token_ids: Tensor  # [T]
    finite: Tensor  # [T]
    logits: Tensor  # [T, V]
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    seen: Tensor  # [T, F], as of `HiddenStates`
    num_new: Tensor  # [S] int64

    @property
    def greedy(self) -> GreedyTokens:
        return GreedyTokens(self.token_ids, self.finite, self.logits)


class Forward:
    """`taps`: what of the model a draft head is fed with, see `Model.tapped`; None without one. `encodings`: of
    pictures, None for a model without an encoder. All ranks of `exchange` go on with the tokens of rank 0."""

    def __init__(
        self,
        model: Network,
        ops: Ops,
        rows: RequestRows,
        cache: CachePool,
        taps: tuple[int, ...] | None = None,
        encodings: Encodings | None = None,
        exchange: Exchange = ALONE,
    ) -> None:
        self._exchange = exchange
        self.model, self.ops, self.rows, self.cache, self._taps = model, ops, rows, cache, taps
        self.encodings = encodings
        self.kinds = make_device_kinds(cache, ops, rows)
        self.pages = Pages(rows.req_to_token, cache.page_size)
        self.known = Known(rows.kv_lens, rows.last_tokens, rows.draft_tokens)

    def capture_failed(self) -> None:
        """Raise EngineError if there are other ranks, which may be in exchanges of the capture: all end."""
        self._exchange.end()
        self._exchange.check()

    def place(self, batch: Batch, num_tokens: int) -> Placement:
        """Compute the places of the step's tokens: the first operation of a step."""
        return self.ops.steps.place_tokens(*batch, self.rows.kv_lens, self.pages, num_tokens)

    def kind_inputs(self, shape: Shape, columns: Columns, batch: Batch, placed: Placement) -> dict[str, Any]:
        """Return what each kind of cache needs of the step, by its name."""
        return {kind.name: kind.inputs(shape, columns, batch.q_start, placed.positions) for kind in self.kinds}

    def context(self, tokens: StepTokens) -> ForwardContext:
        """Make the context of the layers for a step."""
        full = PagedKv(
            page_table=self.rows.req_to_token,
            rows=tokens.batch.rows,
            q_start=tokens.batch.q_start,
            seq_lens=tokens.placed.seq_lens,
            page_size=self.cache.page_size,
            out_cache_loc=tokens.placed.out_cache_loc,
        )
        others = {kind.name: kind.layer_input(full, tokens.kinds.get(kind.name)) for kind in self.kinds}
        placed, adapters = tokens.placed, None
        if self.rows.adapter is not None and self.model.adapters is not None:
            adapters = self.ops.steps.of_tokens(self.rows.adapter, *tokens.batch, len(placed.positions))
        pictures = None
        if self.encodings is not None and tokens.encoded_rows is not None:
            pictures = PictureRows(self.encodings.rows, tokens.encoded_rows, tokens.ahead)
        rotary = None
        if (deltas := self.rows.rope_delta) is not None:
            rotary = self.ops.steps.rope_positions(placed.positions, tokens.rope_positions, *tokens.batch, deltas)
        return ForwardContext(
            positions=placed.positions,
            rope_positions=rotary,
            kinds={KV: full, **others},
            cache=self.cache,
            adapters=adapters,
            pictures=pictures,
        )

    def hidden(self, tokens: StepTokens) -> HiddenStates:
        """Return the hidden state of each token, and whether it is finite. The rows have come further by all of
        them."""
        hidden, seen = self._run(tokens)
        finite = self.ops.sampling.finite_rows(hidden)
        self.ops.steps.advance(self.rows.kv_lens, *tokens.batch)
        return HiddenStates(hidden, finite, seen)

    def _run(self, tokens: StepTokens) -> tuple[Tensor, Tensor]:
        ctx = self.context(tokens)
        if self._taps is not None:
            return self.model.tapped(ctx, tokens.input_ids, self._taps)
        hidden = self.model.forward(ctx, tokens.input_ids)
        return hidden, hidden

    def greedy(self, hidden: Tensor) -> GreedyTokens:
        """Behind hidden [N, H]."""
        logits = self.model.logits(hidden)
        token_ids, finite = self.ops.sampling.argmax_rows(logits)
        for of_rank_0 in (token_ids, finite):
            self._exchange.spread(of_rank_0)
        return GreedyTokens(token_ids, finite, logits)

    def decode(self, tokens: StepTokens, settle: Callable[[GreedyTokens], Tensor]) -> Decoded:
        """Run decodes; `settle` is given what they choose and says how many tokens of each sequence that makes [S]."""
        hidden, seen = self._run(tokens)
        chosen = self.greedy(hidden)
        return Decoded(*chosen, tokens.input_ids, tokens.placed.positions, seen, settle(chosen))

    def accept(self, chosen: GreedyTokens, positions: Tensor, batch: Batch) -> Tensor:
        """See `StepOps.accept`."""
        return self.ops.steps.accept(chosen.token_ids, chosen.finite, positions, *batch, self.known)
