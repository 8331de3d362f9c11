"""The last look at a plan's indices before they become addresses.

To Python and torch a negative index means an entry from the end; to a kernel it may mean anything, and the native
kernels check nothing. What passes here is inside the pools. A plan that does not pass is a bug of ours, and its step
fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from forebay.base.parts import I64, Pool, paths_of
from forebay.requests.step_plan import NO_HOST_WORK, Admission, HostWork, StepPlan


class IndexOutOfPool(Exception):
    """A plan names a row, page, slot, position or token that does not exist, or one twice that may occur once."""


class _Bounded(NamedTuple):
    """A column of a plan with the size of its pool, None if it has none or if the plan gives it."""

    name: str
    length: str
    pool: Pool | None
    least: int
    size: int | None


_COLUMNS: Final = paths_of(StepPlan)
_arrays_of: Final = attrgetter(*_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class PoolBounds:
    """Sizes of the pools that a plan indexes, padding included; `num_slots` are those of the kinds of cache. A decode
    computes `width` tokens at most. Adapters have slots 1..`num_adapters`, encodings rows 1..`num_encodings`."""

    num_rows: int
    pages_per_row: int
    page_size: int
    vocab_size: int
    num_slots: Mapping[str, int]
    width: int = 1
    num_adapters: int = 0
    num_encodings: int = 0

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool for the first column that is too long, too short or has a number outside its pool."""
        arrays, lengths = _arrays_of(plan), dict[str, int]()
        for values, column in compress(zip(arrays, self._columns, strict=True), map(len, arrays)):
            count = len(values)
            if count != lengths.setdefault(column.length, count):
                raise IndexOutOfPool(f"{column.name} of a plan has {count} entries, not {lengths[column.length]}")
            if column.pool is not None:
                size = plan.num_seqs if column.size is None else column.size
                _inside(column.name, values, size, column.least)
        for length, count in lengths.items():
            for place in self._required[length]:
                if not len(arrays[place]):
                    raise IndexOutOfPool(f"{self._columns[place].name} of a plan has 0 entries, not {count}")
        self._check_tokens(plan)
        for admission in plan.admissions:
            self._check_admission(admission)
        self._check_pictures(plan)
        if plan.host is not NO_HOST_WORK:
            self._check_copies(plan.host)

    def _check_copies(self, host: HostWork) -> None:
        for copy in host.copies:
            for kind, slots in copy.slots.items():
                _inside(f"{kind} slots of a copy", slots, self._sizes.get(kind, 0), least=1)

    def _check_admission(self, admission: Admission) -> None:
        if not 0 <= admission.adapter <= self.num_adapters:
            pool = f"the pool has 0..{self.num_adapters}"
            raise IndexOutOfPool(f"the adapter of a plan's row {admission.row} is {admission.adapter}; {pool}")
        _inside("-rope_delta", np.array([-admission.rope_delta]), self.pages_per_row * self.page_size)
        if admission.prebuilt:  # what is known of it came from another engine
            _inside("token_ids", admission.token_ids[-1:].astype(np.int64), self.vocab_size)
            _inside("kv_len", np.array([admission.kv_len]), self.pages_per_row * self.page_size)

    def _check_pictures(self, plan: StepPlan) -> None:
        for encode in plan.pictures.encodes:
            _inside("rows of an encoding", encode.rows, self._sizes["encodings"], least=1)
        if len(plan.pictures.picture_tokens):
            _inside("picture_tokens", plan.pictures.picture_tokens, len(plan.input_ids))
        if len(plan.pictures.span_starts):
            _check_spans(plan)
        if len(plan.pictures.rope_positions) not in (0, 3 * len(plan.input_ids)):
            given = f"{len(plan.pictures.rope_positions)} rope_positions"
            raise IndexOutOfPool(f"a plan has {given} for {len(plan.input_ids)} tokens of prompts")

    def _check_tokens(self, plan: StepPlan) -> None:
        """As many as the sequences compute, and in a step with prompts one of each decode."""
        extends, decodes = plan.q_lens[: plan.num_extends], plan.q_lens[plan.num_extends :]
        _inside("q_lens", decodes, (1 if plan.num_extends else self.width) + 1, least=1)
        if len(plan.drafts) and len(plan.drafts) != decodes.sum() - len(decodes):
            raise IndexOutOfPool(f"drafts of a plan are {len(plan.drafts)} for decodes of {decodes} tokens")
        if plan.num_extends:
            if len(plan.starts) != plan.num_extends or len(plan.input_ids) != extends.sum():
                given = f"{len(plan.starts)} starts and {len(plan.input_ids)} input_ids"
                raise IndexOutOfPool(f"a plan has {given} for extends of {extends} tokens")
            _inside("q_lens", extends, len(plan.input_ids) + 1, least=1)
            _inside("starts + q_lens", plan.ends, self.pages_per_row * self.page_size + 1)

    @cached_property
    def _sizes(self) -> dict[str | None, int]:
        """0 for a kind of cache that the model does not have: there is nothing but padding."""
        num_slots: dict[str | None, int] = {kind: num if num > 1 else 0 for kind, num in self.num_slots.items()}
        return {
            "rows": self.num_rows,
            "columns": self.pages_per_row,
            "lengths": self.pages_per_row * self.page_size + 1,
            "positions": self.pages_per_row * self.page_size,
            "tokens": self.vocab_size,
            "encodings": self.num_encodings + 1 if self.num_encodings else 0,
            **num_slots,
            **{f"{kind} locations": num * self.page_size for kind, num in num_slots.items()},
        }

    @cached_property
    def _columns(self) -> list[_Bounded]:
        own: set[Pool | None] = {None, "seqs"}
        sizes = (None if column.pool in own else self._sizes[column.pool] for column in _COLUMNS.values())
        return [
            _Bounded(path.rpartition(".")[2], column.length, column.pool, column.least, size)
            for (path, column), size in zip(_COLUMNS.items(), sizes, strict=True)
        ]

    @cached_property
    def _required(self) -> dict[str, list[int]]:
        """Indices of the columns that a plan has if another one of their length has entries, by length: all but those
        about kinds of cache that the model does not have."""
        required: dict[str, list[int]] = {}
        for place, column in enumerate(self._columns):
            required.setdefault(column.length, []).extend([place] if column.size != 0 else [])
        return required


def _check_spans(plan: StepPlan) -> None:
    starts, lens = plan.pictures.span_starts, plan.pictures.span_lens
    _inside("span_starts", starts, len(plan.input_ids))
    _inside("span_lens", lens, len(plan.input_ids) + 1, least=1)
    ends = np.cumsum(plan.q_lens[: plan.num_extends])
    end = ends[np.searchsorted(ends, starts, side="right")]
    if (starts + lens > end).any():
        raise IndexOutOfPool(f"spans of a plan end at {starts + lens}; the sequences that they begin in end at {end}")


def _inside(name: str, values: I64, size: int, least: int = 0) -> None:
    """One comparison for both ends: seen as unsigned, a negative number is very large."""
    shifted = values - least if least else values
    if len(values) and not np.maximum.reduce(shifted.view(np.uint64)) < size - least:
        raise IndexOutOfPool(
            f"{name} of a plan lie in {values.min()}..{values.max()}; the pool has {least}..{size - 1}"
        )
