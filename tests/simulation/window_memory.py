"""The KV of windowed layers on the hash model's device: pages of their own, found through its `full_to_window`.

Shape letters: S sequences in the step, T tokens, Q of them that are sampled from, W positions of the longest stretch
that one sequence reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forebay.base.parts import I64, Mask
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.slots import CACHE, PAD, Slots
from forebay.requests.step_plan import StepPlan
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, Touched, check_ids, check_unique, some
from tests.simulation.hashing import U64, WINDOW_WEIGHT, unwindowed, windowed
from tests.simulation.row_lengths import Span

if TYPE_CHECKING:
    from tests.simulation.hash_step import HashStep


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a launched step may read and write: the pages [S, W] of the tokens at `positions` [S, W], from the window of
    a sequence's first token on, and their locations. Positions run on behind a sequence's end; the page does not."""

    memory: WindowMemory
    span: Span
    positions: I64
    pages: I64
    locations: I64
    generations: I64

    def within(self, starts: I64, ends: I64) -> Mask:
        """Which positions [S, W] are read by tokens that begin behind `starts` and come up to `ends` [S]."""
        first = np.maximum(starts - self.memory.window + 1, 0)
        return (self.positions >= first[:, None]) & (self.positions < ends[:, None])

    def at(self, which: I64, positions: I64) -> I64:
        """The locations of tokens at these positions [T] of sequences `which` [T]."""
        if not len(which):
            return which
        locations: I64 = self.locations[which, positions - self.positions[which, 0]]
        return locations

    @property
    def touched(self) -> Touched:
        """What the step may still write or read."""
        read = self.within(self.span.least, self.span.ends)
        written = read & (self.positions >= self.span.least[:, None])
        writers = self.span.tenants[np.nonzero(written)[0]]
        return Touched(
            self.memory.bytes.slots,
            "window pages",
            self.pages[written],
            writers,
            self.pages[read],
            self.generations[read],
        )


class WindowMemory:
    """Changes by plans only, the map by `map_pages` and `map_windows`."""

    def __init__(self, pool: Windows, kv_slots: Slots, page_size: int, context: int) -> None:
        self._pool, self._kv_slots = pool, kv_slots
        self.page_size, self.window = page_size, pool.map.window
        self.full_to_window = np.zeros(kv_slots.num_rows, dtype=np.int32)
        self.bytes = SlotBytes(pool.slots, page_size)
        self._ladder = np.arange(context + pool.map.window + 1, dtype=np.int64)

    def write_map(self, plan: StepPlan) -> None:
        pages, windows = plan.kinds.window.map_pages, plan.kinds.window.map_windows
        if not len(pages):
            return
        check_ids(self._kv_slots, "window page writes for pages", pages)
        check_unique("a page's window", pages)
        if windows.min() < PAD or windows.max() > self._pool.slots.capacity:
            raise RunnerError(f"window pages outside the pool: {windows}")
        self.full_to_window[pages] = windows

    def launch(self, plan: StepPlan, span: Span, table: npt.NDArray[np.int32]) -> Reads:
        """Find what the step may read and write, and check whose it is; `table` is `req_to_token`."""
        first = np.maximum(span.least - self.window + 1, 0)
        positions = first[:, None] + self._ladder[: int((span.ends - first).max(initial=0))]
        full = table[plan.rows[:, None], np.minimum(positions, span.ends[:, None] - 1) // self.page_size]
        pages = self.full_to_window[full].astype(np.int64)
        reads = Reads(
            memory=self,
            span=span,
            positions=positions,
            pages=pages,
            locations=pages * self.page_size + positions % self.page_size,
            generations=self._pool.slots.generation[pages],
        )
        read = reads.within(span.least, span.ends)
        if some(read & ((pages == PAD) | (pages != self._pool.map.full_to_window[full]))):
            raise RunnerError(f"step {plan.step} reads windows that are gone: {pages} of pages {full}")
        self._check_owners(plan, reads, read, full)
        return reads

    def _check_owners(self, plan: StepPlan, reads: Reads, read: Mask, full: I64) -> None:
        pages, tenants = reads.pages, reads.span.tenants[:, None]
        of = self._pool.slots.owner[pages]
        if some(read & (of != CACHE) & (of != tenants)):
            raise RunnerError(f"step {plan.step} reads window pages that neither its request nor the cache holds")
        if some(read & (of != self._kv_slots.owner[full])):
            raise RunnerError(f"step {plan.step}: a window page is not whose its full page is: {pages} of {full}")
        written = read & (reads.positions >= reads.span.least[:, None])
        if some(written & (of != tenants)):
            raise RunnerError(f"step {plan.step} writes window pages {pages} that are not its requests' {tenants}")
        check_unique("a window location", reads.locations[written])

    def chain_before(self, reads: Reads, starts: I64) -> U64:
        """The chain value in front of each sequence's first token, where that is not the first of all. [S]"""
        return unwindowed(self.bytes.words[reads.at(self._ladder[: len(starts)], np.maximum(starts - 1, 0))])

    def compute(self, step: HashStep, chain: U64, position: I64) -> tuple[U64, U64, Mask]:
        """Write the step's KV, chain [T]; returns what is read [S, W], the digests of the windows of the tokens that
        are sampled from, which are at `position` [Q], and which sequences read poison [S]."""
        reads, of = step.windows, step.which[step.sampled]
        assert reads is not None
        self.bytes.words[step.out_window_loc] = windowed(chain)
        self.bytes.poison_padding()
        read = self.bytes.words[reads.locations]
        at = reads.positions[of]
        seen = (at <= position[:, None]) & (at > position[:, None] - self.window)
        digest = (read[of] * WINDOW_WEIGHT[at] * seen).sum(axis=1, dtype=np.uint64)
        used = reads.within(step.starts, step.starts + step.plan.q_lens)
        return read, digest, ((read == POISON) & used).any(axis=1)

    def check_content(self, reads: Reads, i: int, start: int, right: U64, read: U64) -> None:
        """An extend's first tokens may look at places that its last one does not: `right` are all chain values in front
        of `start`, `read` what `compute` returned."""
        first = int(reads.positions[i, 0])
        if not np.array_equal(windowed(right[first:]), read[i, : start - first]):
            raise RunnerError(f"the window [{first}, {start}) holds other tokens' KV")
