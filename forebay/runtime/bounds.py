"""The last look at a plan's indices before they become addresses.

A negative index means the last entry to Python and torch and anything at all to a kernel, and the native kernels check
nothing: what passes here is inside the pools. A plan that does not pass is a fault of ours, and its step fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.requests.step_plan import StepPlan


class IndexOutOfPool(Exception):
    """A plan names a row, page, position or token that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """Sizes of what a plan's numbers index, padding included."""

    num_rows: int
    num_pages: int
    pages_per_row: int
    page_size: int
    vocab_size: int
    num_window_pages: int = 1
    num_slots: int = 1

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool for the first field with a number outside its pool."""
        _inside("rows", plan.rows, self.num_rows)
        _inside("out_cache_loc", plan.out_cache_loc, self.num_pages * self.page_size)
        _inside("seq_lens", plan.seq_lens, self.pages_per_row * self.page_size + 1)
        _inside("input_ids", plan.input_ids, self.vocab_size)
        if len(plan.write_rows):
            _inside("write_rows", plan.write_rows, self.num_rows)
            _inside("write_columns", plan.write_columns, self.pages_per_row)
            _inside("write_pages", plan.write_pages, self.num_pages)
        if len(plan.state_slots):
            self._check_states(plan)
        if len(plan.out_window_loc):
            _inside("out_window_loc", plan.out_window_loc, self.num_window_pages * self.page_size)
            _inside("map_pages", plan.map_pages, self.num_pages)
            _inside("map_windows", plan.map_windows, self.num_window_pages)
        for kept in (*plan.saves, *plan.loads):
            _inside("pages of a copy", kept.pages, self.num_pages)
            _inside("window pages of a copy", kept.window_pages, self.num_window_pages)
            _inside("state slot of a copy", np.array([kept.state_slot]), self.num_slots)

    def _check_states(self, plan: StepPlan) -> None:
        for name in ("state_slots", "snap_slots", "clears", "copy_src", "copy_dst"):
            _inside(name, getattr(plan, name), self.num_slots)
        _inside("snap_seqs", plan.snap_seqs, plan.num_seqs)
        if len(plan.snap_seqs):
            before_end = plan.seq_lens[plan.snap_seqs] - plan.snap_lens
            if before_end.min() < 0 or (before_end >= plan.q_lens[plan.snap_seqs]).any():
                raise IndexOutOfPool(f"snapshots at lengths {plan.snap_lens} lie outside of what the step computes")
        if len(np.intersect1d(plan.copy_src, plan.copy_dst)):
            raise IndexOutOfPool(f"state slots {plan.copy_src} are copied to {plan.copy_dst}: one is both")


def _inside(name: str, values: npt.NDArray[Any], size: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < size):
        raise IndexOutOfPool(f"{name} of a plan lie in {values.min()}..{values.max()}; the pool has 0..{size - 1}")
