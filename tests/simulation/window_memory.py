"""The KV of windowed layers on the hash model's device: pages of their own, found through its `full_to_window`.

Shape letters: S sequences in the step, T tokens, W positions of the longest stretch that one of them reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.memory.kinds.window import Windows
from forebay.memory.slots import CACHE, PAD, Slots
from forebay.requests.parts import I64
from forebay.requests.step_plan import StepPlan
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, Touched, check_ids, check_unique
from tests.simulation.hashing import U64, WINDOW_WEIGHT, unwindowed, windowed

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class WindowReads:
    """What a launched step reads: from the window of its first token on. [S, W] all, `mask` where there is a token, and
    `last` where the last token's window is."""

    first: I64  # [S]
    positions: I64
    locations: I64
    mask: Mask
    last: Mask
    touched: Touched


class WindowMemory:
    """Changes by plans only: the map by `map_pages` and `map_windows`, the KV at `out_window_loc`."""

    def __init__(self, pool: Windows, kv_slots: Slots, page_size: int, context: int) -> None:
        self._pool, self._kv_slots = pool, kv_slots
        self.page_size, self.window = page_size, pool.window
        self.full_to_window = np.zeros(kv_slots.num_rows, dtype=np.int32)
        self.bytes = SlotBytes(pool.slots, page_size)
        self._ladder = np.arange(context + pool.window + 1, dtype=np.int64)

    def write_map(self, plan: StepPlan) -> None:
        pages, windows = plan.windows.map_pages, plan.windows.map_windows
        if not len(pages):
            return
        check_ids(self._kv_slots, "window page writes for pages", pages)
        check_unique("a page's window", pages)
        if windows.min() < PAD or windows.max() > self._pool.slots.capacity:
            raise RunnerError(f"window pages outside the pool: {windows}")
        self.full_to_window[pages] = windows

    def launch(self, plan: StepPlan, table: npt.NDArray[np.int32], tenants: I64) -> WindowReads:
        """Find what the step reads and writes, and check whose it is; `table` is `req_to_token`."""
        starts, ends = plan.seq_lens - plan.q_lens, plan.seq_lens[:, None]
        first = np.maximum(starts - self.window + 1, 0)
        width = int((plan.seq_lens - first).max())
        positions = np.minimum(first[:, None] + self._ladder[:width], ends - 1)
        mask = self._ladder[:width] < (ends - first[:, None])
        pages = table[plan.rows[:, None], positions // self.page_size]
        windows = self.full_to_window[pages].astype(np.int64)
        if (mask & ((windows == PAD) | (windows != self._pool.full_to_window[pages]))).any():
            raise RunnerError(f"step {plan.step} reads windows that are gone: {windows} of pages {pages}")
        locations = windows * self.page_size + positions % self.page_size
        fresh = mask & (positions >= starts[:, None])
        if not np.array_equal(locations[fresh], plan.windows.out_window_loc):
            raise RunnerError(f"out_window_loc {plan.windows.out_window_loc} is not the map's {locations[fresh]}")
        check_unique("a window location", plan.windows.out_window_loc)
        self._check_owners(plan, windows, pages, mask, tenants)
        return WindowReads(
            first=first,
            positions=positions,
            locations=locations,
            mask=mask,
            last=mask & (positions >= ends - self.window),
            touched=Touched(
                self._pool.slots,
                "window pages",
                plan.windows.out_window_loc // self.page_size,
                np.repeat(tenants, plan.q_lens),
                np.unique(windows[mask]),
            ),
        )

    def _check_owners(self, plan: StepPlan, windows: I64, pages: I64, mask: Mask, tenants: I64) -> None:
        of = self._pool.slots.owner[windows]
        if (mask & (of != CACHE) & (of != tenants[:, None])).any():
            raise RunnerError(f"step {plan.step} reads window pages that neither its request nor the cache holds")
        if (mask & (of != self._kv_slots.owner[pages])).any():
            raise RunnerError(f"step {plan.step}: a window page is not whose its full page is: {windows} of {pages}")
        written, writers = plan.windows.out_window_loc // self.page_size, np.repeat(tenants, plan.q_lens)
        if (self._pool.slots.owner[written] != writers).any():
            raise RunnerError(f"step {plan.step} writes window pages {written} that are not its requests' {writers}")

    def chain_before(self, plan: StepPlan, reads: WindowReads) -> U64:
        """The chain value in front of each sequence's first token, where that is not the first of all. [S]"""
        at = np.maximum(plan.seq_lens - plan.q_lens - 1 - reads.first, 0)
        return unwindowed(self.bytes.words[reads.locations[self._ladder[: plan.num_seqs], at]])

    def compute(self, plan: StepPlan, reads: WindowReads, chain: U64) -> tuple[U64, U64, Mask]:
        """Write the step's KV, chain [T]; returns what is read [S, W], the last windows' digests [S], and which
        sequences read poison [S]."""
        self.bytes.words[plan.windows.out_window_loc] = windowed(chain)
        self.bytes.poison_padding()
        read = self.bytes.words[reads.locations]
        digest = (read * WINDOW_WEIGHT[reads.positions] * reads.last).sum(axis=1, dtype=np.uint64)
        return read, digest, ((read == POISON) & reads.mask).any(axis=1)

    def check_content(self, reads: WindowReads, i: int, start: int, right: U64, read: U64) -> None:
        """An extend's first tokens may look at places that its last one does not: `right` are all chain values in front
        of `start`, `read` what `compute` returned."""
        first = int(reads.first[i])
        if not np.array_equal(windowed(right[first:]), read[i, : start - first]):
            raise RunnerError(f"the window [{first}, {start}) holds other tokens' KV")
