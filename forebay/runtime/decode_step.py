"""One token for each of up to B rows, as a step of fixed shape: embedding to greedy token.

Shape letters: B rows, padding included, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.memory.slots import PAD
from forebay.models.model import Model
from forebay.ops import Ops
from forebay.ops.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.pools.table import Column, Table
from forebay.pools.window_pages import WindowPages
from forebay.runtime.graph_backends import GraphBackend
from forebay.runtime.graph_runner import GraphRunner
from forebay.runtime.paged import paged_kv

_WIDTH: Final = 1  # tokens per row


class DecodeInputs(Table):
    """What differs from step to step. A padded row is request row 0 with one token, whose KV goes to page 0.

    The field's `mamba_track_mask` is where `mamba_track_indices` is not PAD: one fact, one column.
    """

    req_pool_indices = Column(torch.int32, pad=PAD)
    seq_lens = Column(torch.int32, pad="W")  # after the step; W is the step's query width
    positions = Column(torch.int64, pad=0)
    out_cache_loc = Column(torch.int64, pad=PAD)
    out_window_loc = Column(torch.int64, pad=PAD)
    state_slots = Column(torch.int32, pad=PAD)
    mamba_track_indices = Column(torch.int32, pad=PAD)  # where the state goes too, PAD for nowhere


class DecodeOutputs(NamedTuple):
    """`token_ids` [B] int64 are the most likely, and stand in `last_tokens` already; 0 where not `finite` [B] bool.
    `logits` [B, V] float32."""

    token_ids: Tensor
    finite: Tensor
    logits: Tensor


class DecodeStep:
    """Row i's token is read from, and its successor written to, `rows.last_tokens`."""

    def __init__(
        self, model: Model, ops: Ops, rows: RequestRows, cache: CachePool, windows: WindowPages | None, *, most: int
    ) -> None:
        self._model, self._ops = model, ops
        self._rows, self._cache, self._windows = rows, cache, windows
        self._counts = torch.arange(most + 1, dtype=torch.int32, device=rows.last_tokens.device)

    def __call__(self, inputs: DecodeInputs) -> DecodeOutputs:
        ops, last_tokens = self._ops, self._rows.last_tokens
        input_ids = ops.gather(last_tokens, inputs.req_pool_indices)
        hidden = self._model.forward(self._context(inputs), input_ids)
        logits = self._model.logits(hidden)
        token_ids, finite = ops.argmax_rows(logits)
        ops.scatter(last_tokens, inputs.req_pool_indices, token_ids)
        return DecodeOutputs(token_ids, finite, logits)

    def _context(self, inputs: DecodeInputs) -> ForwardContext:
        n = inputs.num_rows
        q_start = self._counts[: n + 1]
        full, window = paged_kv(
            self._rows, self._windows, inputs.req_pool_indices, inputs.out_cache_loc, inputs.out_window_loc
        )
        return ForwardContext(
            positions=inputs.positions,
            q_start=q_start,
            seq_lens=inputs.seq_lens,
            page_size=self._cache.page_size,
            full=full,
            window=window,
            states=StateBatch(
                slots=inputs.state_slots,
                q_start=q_start,
                snap_start=q_start,
                snap_ends=self._counts[1 : n + 1],
                snap_slots=inputs.mamba_track_indices,
            ),
            cache=self._cache,
        )


def decode_runner(
    model: Model,
    ops: Ops,
    rows: RequestRows,
    cache: CachePool,
    windows: WindowPages | None,
    *,
    sizes: Sequence[int],
    backend: GraphBackend,
) -> GraphRunner[DecodeInputs, DecodeOutputs]:
    most = max(sizes)
    inputs = DecodeInputs(most, device=rows.last_tokens.device, sizes={"W": _WIDTH})
    step = DecodeStep(model, ops, rows, cache, windows, most=most)
    return GraphRunner(step, inputs, writes=[(rows, "last_tokens")], sizes=sizes, backend=backend)
