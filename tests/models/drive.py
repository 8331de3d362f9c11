"""Drives a Model without an engine: hands out pages and state slots, builds contexts, returns logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.layers.states import States
from forebay.models import Model
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool
from tests.pools.caches import cache_types

NUM_ROWS = 6
NUM_SNAPSHOTS = 8  # state slots besides the rows' own


class Driver:
    """Rows 1..NUM_ROWS of `context` tokens each, over pages dealt out in a seeded shuffle; unwritten KV is NaN.

    Row r's live state is slot r; slots above NUM_ROWS are for snapshots. Windowed layers have a page table of their
    own, another shuffle.
    """

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 4,
        context: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        ssm_dtype: torch.dtype = torch.float32,
        width: int = 1,
        chunked_scans: bool = False,
    ) -> None:
        self.model = model
        page_size = self.page_size = of_whole_entries(page_size, model)
        columns = -(-context // page_size)
        num_pages = NUM_ROWS * columns
        self.cache = CachePool(
            model.cache_specs(),
            replace(cache_types(dtype, ssm_dtype), width=width, chunked_scans=chunked_scans),
            page_size=page_size,
            num_slots={"kv": num_pages, "window": num_pages, "state": NUM_ROWS + NUM_SNAPSHOTS, "ring": NUM_ROWS},
            device="cpu",
        )
        for kind in ("kv", "window", "ring"):
            for tensor in self.cache.tables[kind].tensors:
                tensor.fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        self.page_table, self.window_table = (_shuffled(num_pages, columns, generator) for _ in range(2))
        self.lens = [0] * (NUM_ROWS + 1)
        self.slots: list[int] | None = None  # of each row's adapter

    def step(
        self, batch: Sequence[tuple[int, Sequence[int]]], snapshots: Sequence[tuple[int, int, int]] = ()
    ) -> list[Tensor]:
        """One forward of (row, its next tokens) pairs; the logits of each pair's tokens, [tokens, V].

        `snapshots` are (index of the pair, number of its tokens after which, slot), in ascending order.
        """
        ctx, input_ids = self.inputs(batch, snapshots)
        hidden = self.model.forward(ctx, input_ids)
        return list(torch.split(self.model.logits(hidden), [len(ids) for _, ids in batch]))

    def inputs(
        self, batch: Sequence[tuple[int, Sequence[int]]], snapshots: Sequence[tuple[int, int, int]] = ()
    ) -> tuple[ForwardContext, Tensor]:
        """What `forward` is given for a step, see there; the rows have these tokens from now on."""
        tokens = [token for _, ids in batch for token in ids]
        counts = torch.tensor([len(ids) for _, ids in batch])
        positions = torch.cat([torch.arange(self.lens[row], self.lens[row] + len(ids)) for row, ids in batch])
        rows = torch.tensor([row for row, _ in batch], dtype=torch.int32)
        owner = rows.long().repeat_interleave(counts)
        for row, ids in batch:
            self.lens[row] += len(ids)
        seq_lens = [self.lens[row] for row, _ in batch]
        q_start = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32)
        full, window = (
            PagedKv(
                page_table=table,
                rows=rows,
                q_start=q_start,
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
                page_size=self.page_size,
                out_cache_loc=self._slots(table, owner, positions),
            )
            for table in (self.page_table, self.window_table)
        )
        states = States(state_batch(rows, q_start, positions, snapshots))
        kinds = {"kv": full, "window": window, "state": states, "ring": full}
        slots = None if self.slots is None else torch.tensor(self.slots, dtype=torch.int32)[owner]
        rotary = positions.repeat(3, 1) if self.model.mrope else None
        ctx = ForwardContext(positions=positions, kinds=kinds, cache=self.cache, rope_positions=rotary, adapters=slots)
        return ctx, torch.tensor(tokens, dtype=torch.int64)

    def restart(self, row: int) -> None:
        """Row `row` is handed to a new sequence; its pages hold what the last one left there."""
        self.lens[row] = 0
        self.cache.tables["state"].reset_rows(torch.tensor([row]))

    def resume(self, row: int, slot: int, source: int, length: int) -> None:
        """Row `row` goes on from snapshot `slot`, which row `source` took at `length` tokens."""
        self.page_table[row] = self.page_table[source]
        self.window_table[row] = self.window_table[source]
        self.lens[row] = length
        self.cache.mover.copy("state", torch.tensor([slot]), torch.tensor([row]))

    def _slots(self, table: Tensor, owner: Tensor, positions: Tensor) -> Tensor:
        return table[owner, positions // self.page_size].long() * self.page_size + positions % self.page_size


def state_batch(
    rows: Tensor, q_start: Tensor, positions: Tensor, snapshots: Sequence[tuple[int, int, int]] = ()
) -> StateBatch:
    """Of sequences whose state slots are `rows`; `snapshots` as for `Driver.step`."""
    ends = [int(q_start[i]) + after for i, after, _ in snapshots]
    counts = torch.bincount(torch.tensor([i for i, _, _ in snapshots], dtype=torch.int64), minlength=len(rows))
    return StateBatch(
        slots=rows,
        write_slots=rows,
        q_start=q_start,
        q_stop=q_start[1:],
        snap_start=torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32),
        snap_ends=torch.tensor(ends, dtype=torch.int32),
        snap_slots=torch.tensor([slot for _, _, slot in snapshots], dtype=torch.int32),
        positions=positions,
    )


def of_whole_entries(page_size: int, model: Model) -> int:
    """Return the next page size that holds whole entries of all layers that keep one for several tokens."""
    columns = (column for spec in model.cache_specs() for column in spec.columns(cache_types(torch.float32)))
    multiple = math.lcm(*(max(1, column.tokens) for column in columns))
    return -(-page_size // multiple) * multiple


def _shuffled(num_pages: int, columns: int, generator: torch.Generator) -> Tensor:
    table = torch.zeros(NUM_ROWS + 1, columns, dtype=torch.int32)
    table[1:] = (torch.randperm(num_pages, generator=generator) + 1).view(NUM_ROWS, columns)
    return table
