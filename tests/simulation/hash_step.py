"""A step that the hash model's device was given, between its launch and its result.

Shape letters: S sequences in the step, T tokens, Q of them that are sampled from, L longest sequence, P its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from forebay.base.parts import I64
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.slots import LOADING, Slots
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.scheduler.memory.pools import Pools as SchedulerPools
from tests.kinds_of import states_of, windows_of
from tests.simulation.device_memory import Touched
from tests.simulation.hashing import U64
from tests.simulation.row_lengths import Span
from tests.simulation.window_memory import Reads

if TYPE_CHECKING:
    from tests.simulation.hash_runner import HashRunner

_NONE: Final = np.empty(0, dtype=np.int64)
_NOTHING: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The scheduler's pools: read to check who owns what, never to compute."""

    kv: Slots
    rows: Slots
    windows: Windows | None = None
    states: Slots | None = None

    @classmethod
    def of(cls, pools: SchedulerPools) -> Self:
        return cls(
            kv=pools.kv,
            rows=pools.rows.slots,
            windows=windows_of(pools) if windows_of(pools) else None,
            states=states_of(pools).pool if states_of(pools) else None,
        )


class HashStep:
    """A launched step. Its KV is written and its tokens are sampled when `result` is called, not before: whoever
    believes that a launched step has completed will find poison.

    Its page table is that of its launch: `pages` [S, P], the hand-outs `generations` that they are of, and `locations`
    [S, L] of their tokens. How much of it a decode uses is known when the steps before it have completed.
    """

    def __init__(self, runner: HashRunner, plan: StepPlan, span: Span, pages: I64, saved_rows: list[int]) -> None:
        self.plan, self.span, self.pages, self.saved_rows = plan, span, pages, saved_rows
        self.windows: Reads | None = None
        self._runner = runner
        self.tenants = span.tenants
        self.generations: I64 = runner.pools.kv.generation[pages]
        self.locations = runner.locations(pages)
        self.starts = self.firsts = self.which = self.inside = self.sampled = _NONE
        self.out_cache_loc = self.out_window_loc = _NONE
        self.states: U64 = np.empty(0, dtype=np.uint64)
        self.others: list[Touched] = []  # besides pages and window pages
        self._touched, self._touched_at = self.others, -1
        rows, kv = runner.pools.rows, runner.pools.kv
        self.others.append(Touched(rows, "rows", plan.rows, rows.owner[plan.rows], plan.rows))
        for load in plan.host.loads:
            self._comes_back(kv, "pages", load.request_id, load.slots["kv"])
            if runner.pools.windows:
                self._comes_back(runner.pools.windows.slots, "window pages", load.request_id, load.slots["window"])

        for fetch in plan.host.fetches:
            self._comes_back(kv, "pages", LOADING, fetch.slots["kv"])
            for slots in (runner.pools.windows.slots if runner.pools.windows else None, runner.pools.states):
                if slots is not None:
                    self._comes_back(slots, slots.name, LOADING, fetch.slots[slots.name])

    def _comes_back(self, slots: Slots, what: str, request_id: int, ids: I64) -> None:
        self.others.append(Touched(slots, what, ids, np.full(len(ids), request_id, dtype=np.int64), ids))

    @property
    def touched(self) -> list[Touched]:
        """What it may still write or read, which is less whenever its span has been narrowed."""
        if self._touched_at != self.span.num_narrowed:
            self._touched, self._touched_at = self._find_touched(), self.span.num_narrowed
        return self._touched

    def _find_touched(self) -> list[Touched]:
        span, ps = self.span, self._runner.page_size
        first = np.arange(self.pages.shape[1], dtype=np.int64) * ps
        read = first < span.ends[:, None]
        written = read & (first + ps > span.least[:, None])
        pages = Touched(
            self._runner.pools.kv,
            "pages",
            self.pages[written],
            self.tenants[np.nonzero(written)[0]],
            self.pages[read],
            self.generations[read],
        )
        return [pages, *self.others, *([self.windows.touched] if self.windows else [])]

    def begin(self, starts: I64) -> None:
        """It is its turn, and its sequences begin behind `starts` tokens [S]: where its own T tokens belong, and after
        which of them something is sampled [Q]."""
        plan, ends = self.plan, np.cumsum(self.plan.q_lens)
        self.starts, self.firsts = starts, ends - plan.q_lens
        self.which = np.repeat(np.arange(plan.num_seqs, dtype=np.int64), plan.q_lens)
        self.inside = np.arange(len(self.which), dtype=np.int64) - self.firsts[self.which]
        decoded = np.arange(len(plan.input_ids), len(self.which), dtype=np.int64)
        self.sampled = np.concatenate([ends[: plan.num_extends] - 1, decoded])
        self.out_cache_loc = self.locations[self.which, starts[self.which] + self.inside]
        if self.windows:
            self.out_window_loc = self.windows.at(self.which, starts[self.which] + self.inside)

    def result(self, *, fails: bool = False, poisoned: Mapping[int, int] = _NOTHING) -> StepResult:
        """What the step sampled; with `fails` it raises StepFailed instead and leaves garbage behind. `poisoned` has by
        sequence the first token, of those that the step computes of it, for which something is not finite."""
        return self._runner.execute(self, fails=fails, poisoned=poisoned)
