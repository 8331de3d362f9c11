"""The last look at a plan's indices before they become addresses.

A negative index means the last entry to Python and torch and anything at all to a kernel, and the native kernels check
nothing: what passes here is inside the pools. A plan that does not pass is a fault of ours, and its step fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.memory.slots import PAD
from forebay.requests.step_plan import StepPlan


class IndexOutOfPool(Exception):
    """A plan names a row, page, slot, position or token that does not exist, or one twice where it may stand once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBounds:
    """Sizes of what a plan's numbers index, padding included: a model without windows or states has only that."""

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
        if self.num_window_pages > 1:
            self._check_windows(plan)
        if self.num_slots > 1:
            self._check_states(plan)
        for kept in (*plan.saves, *plan.loads):
            _inside("pages of a copy", kept.pages, self.num_pages, least=1)
            _inside("window_pages of a copy", kept.window_pages, self.num_window_pages, least=1)
            _inside("state_slot of a copy", np.array([kept.state_slot]), self.num_slots)

    def _check_windows(self, plan: StepPlan) -> None:
        _as_many("out_window_loc", plan.out_window_loc, plan.num_tokens)
        _inside("out_window_loc", plan.out_window_loc, self.num_window_pages * self.page_size)
        _inside("map_pages", plan.map_pages, self.num_pages, least=1)
        _inside("map_windows", plan.map_windows, self.num_window_pages)

    def _check_states(self, plan: StepPlan) -> None:
        """What the step writes, whether the model or what comes before it, it writes once, and padding never."""
        _as_many("state_slots", plan.state_slots, plan.num_seqs)
        _inside("state_slots", plan.state_slots, self.num_slots)
        if len(plan.clears) or len(plan.copy_dst):
            _inside("clears", plan.clears, self.num_slots, least=1)
            _inside("copy_src", plan.copy_src, self.num_slots, least=1)
            _inside("copy_dst", plan.copy_dst, self.num_slots, least=1)
            _once("clears and copy_dst", plan.clears, plan.copy_dst)
            _once("copy_src, clears and copy_dst", np.unique(plan.copy_src), plan.clears, plan.copy_dst)
        if len(plan.snap_seqs):
            self._check_snapshots(plan)
            _once("state_slots and snap_slots", plan.state_slots, plan.snap_slots)
        else:
            _once("state_slots", plan.state_slots)

    def _check_snapshots(self, plan: StepPlan) -> None:
        _inside("snap_slots", plan.snap_slots, self.num_slots, least=1)
        _inside("snap_seqs", plan.snap_seqs, plan.num_seqs)
        stops = plan.seq_lens[plan.snap_seqs]
        left = stops - plan.snap_lens
        if (left < 0).any() or (left >= plan.q_lens[plan.snap_seqs]).any():
            raise IndexOutOfPool(f"snap_lens {plan.snap_lens} lie outside of what the step computes, up to {stops}")
        order = plan.snap_seqs * (self.pages_per_row * self.page_size + 1) + plan.snap_lens
        if (np.diff(order) <= 0).any():
            raise IndexOutOfPool(f"snap_seqs {plan.snap_seqs} at snap_lens {plan.snap_lens} are not in order")


def _inside(name: str, values: npt.NDArray[Any], size: int, *, least: int = 0) -> None:
    if len(values) and not (values.min() >= least and values.max() < size):
        raise IndexOutOfPool(
            f"{name} of a plan lie in {values.min()}..{values.max()}; the pool has {least}..{size - 1}"
        )


def _as_many(name: str, values: npt.NDArray[Any], count: int) -> None:
    if len(values) != count:
        raise IndexOutOfPool(f"{name} of a plan has {len(values)} entries, not {count}")


def _once(name: str, *slots: npt.NDArray[Any]) -> None:
    """No slot but PAD stands twice in all of them together."""
    counts = np.bincount(slots[0] if len(slots) == 1 else np.concatenate(slots), minlength=1)
    counts[PAD] = 0
    if counts.max() > 1:
        raise IndexOutOfPool(f"{name} of a plan name slots {np.flatnonzero(counts > 1).tolist()} more than once")
