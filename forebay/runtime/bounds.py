"""The last look at a plan's indices before they become addresses.

To Python and torch a negative index means an entry from the end; to a kernel it may mean anything, and the native
kernels check nothing. What passes here is inside the pools. A plan that does not pass is a bug of ours, and its step
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final

import numpy as np

from forebay.memory.slots import PAD
from forebay.requests.parts import I64, Column, Pool, paths_of
from forebay.requests.step_plan import Kept, StepPlan


class IndexOutOfPool(Exception):
    """A plan names a row, page, slot, position or token that does not exist, or one twice where it may stand once."""


_COLUMNS: Final = paths_of(StepPlan)
_arrays_of: Final = attrgetter(*_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class PoolBounds:
    """Sizes of the pools that a plan indexes, padding included; 0 for what the model does not have."""

    num_rows: int
    num_pages: int
    pages_per_row: int
    page_size: int
    vocab_size: int
    num_window_pages: int = 1
    num_slots: int = 1

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool for the first column that is too long, too short or has a number outside its pool."""
        lengths: dict[str, int] = {}
        for values, (name, column, size) in zip(_arrays_of(plan), self._columns, strict=True):
            count = len(values)
            # A column about what the model does not have may be left out.
            if count != lengths.setdefault(column.length, count) and (count or size != 0):
                raise IndexOutOfPool(f"{name} of a plan has {count} entries, not {lengths[column.length]}")
            if count and size is not None:
                _inside(name, values, size, column.least)
        if len(plan.states.state_slots):
            self._check_states(plan)
        for kept in (*plan.host.saves, *plan.host.loads):
            for name, column in Kept.columns.items():
                _inside(f"{name} of a copy", getattr(kept, name), self._sizes[column.pool], column.least)
            _inside("state_slot of a copy", np.array([kept.state_slot]), self.num_slots)

    @cached_property
    def _sizes(self) -> dict[Pool | None, int]:
        """0 for what the model does not have."""
        num_windows = self.num_window_pages if self.num_window_pages > 1 else 0
        return {
            "rows": self.num_rows,
            "columns": self.pages_per_row,
            "lengths": self.pages_per_row * self.page_size + 1,
            "pages": self.num_pages,
            "locations": self.num_pages * self.page_size,
            "window_pages": num_windows,
            "window_locations": num_windows * self.page_size,
            "slots": self.num_slots if self.num_slots > 1 else 0,
            "tokens": self.vocab_size,
        }

    @cached_property
    def _columns(self) -> list[tuple[str, Column, int | None]]:
        """Each column's name and the size of its pool, where that is not the plan's own business."""
        return [(path.rpartition(".")[2], column, self._sizes.get(column.pool)) for path, column in _COLUMNS.items()]

    def _check_states(self, plan: StepPlan) -> None:
        """The model and the copies before it write each state slot at most once, and never the padding slot."""
        work = plan.states
        if len(work.clears) or len(work.copy_dst):
            _once("clears and copy_dst", work.clears, work.copy_dst)
            _once("copy_src, clears and copy_dst", np.unique(work.copy_src), work.clears, work.copy_dst)
        if len(work.snap_seqs):
            self._check_snapshots(plan)
            _once("state_slots and snap_slots", work.state_slots, work.snap_slots)
        else:
            _once("state_slots", work.state_slots)

    def _check_snapshots(self, plan: StepPlan) -> None:
        seqs, lens = plan.states.snap_seqs, plan.states.snap_lens
        _inside("snap_seqs", seqs, plan.num_seqs)
        stops = plan.seq_lens[seqs]
        left = stops - lens
        if (left < 0).any() or (left >= plan.q_lens[seqs]).any():
            raise IndexOutOfPool(f"snap_lens {lens} lie outside of what the step computes, up to {stops}")
        order = seqs * self._sizes["lengths"] + lens
        if (np.diff(order) <= 0).any():
            raise IndexOutOfPool(f"snap_seqs {seqs} at snap_lens {lens} are not in order")


def _inside(name: str, values: I64, size: int, least: int = 0) -> None:
    """One comparison for both ends: seen as unsigned, a negative number is very large."""
    shifted = values - least if least else values
    if len(values) and not np.maximum.reduce(shifted.view(np.uint64)) < size - least:
        raise IndexOutOfPool(
            f"{name} of a plan lie in {values.min()}..{values.max()}; the pool has {least}..{size - 1}"
        )


def _once(name: str, *slots: I64) -> None:
    """No slot but PAD stands twice in all of them together."""
    counts = np.bincount(slots[0] if len(slots) == 1 else np.concatenate(slots), minlength=1)
    counts[PAD] = 0
    if counts.max() > 1:
        raise IndexOutOfPool(f"{name} of a plan name slots {np.flatnonzero(counts > 1).tolist()} more than once")
