"""The device's columns of each request, indexed by request row. The host's tables are the truth (C1, C10)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forebay.base.sampling import DRAWS
from forebay.memory.adapters import ADAPTER
from forebay.memory.slots import PAD
from forebay.pools.regions import Take
from forebay.pools.table import Column, Table

ROPE_DELTA: Final = "rope_delta"


class SamplingRows(Table):
    """The numbers by which each row's tokens are drawn, and its seed; the pads are greedy."""

    declared = {
        number.name: Column(torch.int64 if number.is_whole else torch.float32, pad=number.neutral) for number in DRAWS
    }
    seed = Column(torch.int64, pad=0)


class RequestRows(SamplingRows):
    """R + 1 rows: the page table, the progress of the row, and the sampling columns. P is the pages per row, G the most
    draft tokens behind the last: 0 without speculation. With `adapters` each row has the slot of its own, PAD for none.
    With `mrope` each row has the addition to a token's position in its rotation: at most 0."""

    req_to_token = Column(torch.int32, ("P",), pad=PAD)  # one entry per page
    kv_lens = Column(torch.int64, pad=0)  # tokens with KV: the host may know no more than a bound
    last_tokens = Column(torch.int64, pad=0)  # sampled, without KV so far
    draft_tokens = Column(torch.int64, ("G",), pad=0)  # to follow it; any numbers behind those of a step

    def __init__(
        self,
        capacity: int,
        pages_per_row: int,
        *,
        num_drafts: int = 0,
        adapters: bool = False,
        mrope: bool = False,
        device: torch.device | str = "cpu",
        take: Take | None = None,
    ) -> None:
        columns = self.declared | ({ADAPTER: Column(torch.int32, pad=PAD)} if adapters else {})
        columns |= {ROPE_DELTA: Column(torch.int64, pad=0)} if mrope else {}
        sizes = {"P": pages_per_row, "G": num_drafts}
        super().__init__(capacity + 1, device=device, columns=columns, sizes=sizes, take=take)

    @property
    def adapter(self) -> Tensor | None:
        """The slots of the rows' adapters; None without adapters."""
        return self[ADAPTER] if ADAPTER in self.columns else None

    @property
    def rope_delta(self) -> Tensor | None:
        """The deltas of the rows' rotary positions; None without M-RoPE."""
        return self[ROPE_DELTA] if ROPE_DELTA in self.columns else None
