"""The last look at a plan's indices before they become addresses.

A negative index means the last entry to Python and torch and anything at all to a kernel, and the native kernels check
nothing: what passes here is inside the pools. A plan that does not pass is a fault of ours, and its step fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def _inside(name: str, values: npt.NDArray[Any], size: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < size):
        raise IndexOutOfPool(f"{name} of a plan lie in {values.min()}..{values.max()}; the pool has 0..{size - 1}")
