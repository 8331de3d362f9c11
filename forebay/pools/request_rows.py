"""What the device knows of each request, indexed by request row. The host's tables are the truth (C1, C10)."""

from __future__ import annotations

import torch

from forebay.memory.slots import PAD
from forebay.pools.table import Column, Table


class SamplingRows(Table):
    """How each row's tokens are chosen, as `SamplingParams` has it; the pads are greedy."""

    temperature = Column(torch.float32, pad=0)
    top_k = Column(torch.int64, pad=0)
    top_p = Column(torch.float32, pad=1)
    min_p = Column(torch.float32, pad=0)
    repetition_penalty = Column(torch.float32, pad=1)
    presence_penalty = Column(torch.float32, pad=0)
    frequency_penalty = Column(torch.float32, pad=0)
    seed = Column(torch.int64, pad=0)


class RequestRows(SamplingRows):
    """R + 1 rows: the page table, the last sampled token, and the sampling columns. P is the pages per row."""

    req_to_token = Column(torch.int32, ("P",), pad=PAD)  # one entry per page
    last_tokens = Column(torch.int64, pad=0)

    def __init__(self, capacity: int, pages_per_row: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(capacity + 1, device=device, sizes={"P": pages_per_row})
