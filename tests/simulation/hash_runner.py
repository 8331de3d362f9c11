"""A runner whose next token is a hash of all that layers keep: every KV slot of the sequence, read through the page
table, those of its last window, read through the window map, and its recurrent state.

A wrong, stale or unwritten page or slot, a wrong position, a missing row write or a wrong prefix hit changes the
tokens. What could stay unseen by luck is an error by itself: see `RunnerError`.

Shape letters: S sequences in the step, E of them extends, T tokens, L longest sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.kinds.window import Windows
from forebay.memory.slots import CACHE, PAD, Slots
from forebay.requests.parts import I64
from forebay.requests.step_plan import HostCopy, StepPlan, StepResult, TokenLogprob
from forebay.scheduler.residency import Residencies
from tests.kinds_of import states_of, windows_of
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, Touched, check_unique
from tests.simulation.hashing import (
    KEY,
    PLACE,
    STATE_KEY,
    U64,
    WEIGHT,
    HashModel,
    chain_values,
    logprob_of,
    mix_array,
    seed_of,
)
from tests.simulation.host_memory import HostMemory
from tests.simulation.state_memory import StateMemory
from tests.simulation.window_memory import WindowMemory, WindowReads

NO_TOKEN: Final = -1
_NONE: Final = np.empty(0, dtype=np.int64)
_NO_WORDS: Final = np.empty(0, dtype=np.uint64)
Mask = npt.NDArray[np.bool_]


class StepFailed(RuntimeError):
    """An injected fault: this step did not complete."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The scheduler's pools: read to check who owns what, never to compute."""

    kv: Slots
    rows: Slots
    windows: Windows | None = None
    states: Slots | None = None

    @classmethod
    def of(cls, held: Residencies) -> Self:
        return cls(
            kv=held.kv,
            rows=held.rows.slots,
            windows=windows_of(held) if windows_of(held) else None,
            states=states_of(held).pool if states_of(held) else None,
        )


class HashStep:
    """A launched step. Its KV is written and its tokens are sampled when `result` is called, not before: whoever
    believes that a launched step has completed will find poison."""

    def __init__(
        self,
        runner: HashRunner,
        plan: StepPlan,
        locations: I64,
        mask: Mask,
        saved_lens: list[int],
        windows: WindowReads | None,
    ) -> None:
        self.plan, self.locations, self.mask, self.saved_lens, self.windows = plan, locations, mask, saved_lens, windows
        self._runner = runner
        ps, kv, rows = runner.page_size, runner.pools.kv, runner.pools.rows
        self.tenants: I64 = runner.tenant[plan.rows]
        written, writers = plan.out_cache_loc // ps, np.repeat(self.tenants, plan.q_lens)
        self.touched = [
            Touched(kv, "pages", written, writers, np.unique((locations // ps)[mask])),
            Touched(rows, "rows", plan.rows, rows.owner[plan.rows], plan.rows),
        ]
        self.touched += [windows.touched] if windows else []
        for load in plan.host.loads:
            self._comes_back(kv, "pages", load.request_id, load.slots["kv"])
            if runner.pools.windows:
                self._comes_back(runner.pools.windows.slots, "window pages", load.request_id, load.slots["window"])

    def _comes_back(self, slots: Slots, what: str, request_id: int, ids: I64) -> None:
        self.touched.append(Touched(slots, what, ids, np.full(len(ids), request_id, dtype=np.int64), ids))

    def result(self, *, fails: bool = False, poisoned: tuple[int, ...] = ()) -> StepResult:
        """What the step sampled; with `fails` it raises StepFailed instead and leaves garbage behind. The sequences
        `poisoned` turn out not finite."""
        return self._runner.execute(self, fails=fails, poisoned=poisoned)


class HashRunner:
    """`requests.step_plan.Runner` in numpy. Device state changes by plans only.

    `salt` gives the salt of a request's namespace: what the adapter or the weights' version would be to a real model.
    """

    def __init__(self, config: SchedulerConfig, pools: Pools, model: HashModel, *, salt: Callable[[int], int]) -> None:
        ps, rows = config.page_size, config.max_running_requests + 1
        self.page_size, self.pools, self.model = ps, pools, model
        self.table = np.zeros((rows, -(-config.context_length // ps)), dtype=np.int32)
        self.pages = SlotBytes(pools.kv, ps)
        self.kv = self.pages.words
        self.windows = WindowMemory(pools.windows, pools.kv, ps, config.context_length) if pools.windows else None
        self.states = StateMemory(pools.states) if pools.states else None
        self.host = HostMemory(self.pages, self.windows, self.states)
        self.last_tokens = np.full(rows, NO_TOKEN, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.salts = np.zeros(rows, dtype=np.uint64)
        self.counts = np.zeros(rows, dtype=np.uint64)
        self.known: list[list[int]] = [[]] * rows
        self.wants_logprob = np.zeros(rows, dtype=bool)
        self.tenant = np.zeros(rows, dtype=np.int64)
        self.row_of: dict[int, int] = {}
        self.kv_len = np.zeros(rows, dtype=np.int64)
        self.sampling = np.zeros(rows, dtype=bool)
        self.broken: set[int] = set()  # requests with garbage in their KV or state: their tokens must never be seen
        self.cached: dict[int, int] = {}  # where the first extend of each request began
        self.in_flight: deque[HashStep] = deque()
        self._salt = salt
        self._ladder = np.arange(config.context_length + ps, dtype=np.int64)

    # -- launching: in the order of the plans, before the earlier ones completed ---------------------------------------

    def launch(self, plan: StepPlan) -> HashStep:
        saved_lens = [int(self.kv_len[self.row_of[save.request_id]]) for save in plan.host.saves]
        self._write_table(plan)
        if self.windows:
            self.windows.write_map(plan)
        self._move_in(plan)
        self._check_lengths(plan)
        locations, mask = self._read_table(plan)
        tenants = self.tenant[plan.rows]
        self._check_owners(plan, locations, mask, tenants)
        windows = self.windows.launch(plan, self.table, tenants) if self.windows else None
        step = HashStep(self, plan, locations, mask, saved_lens, windows)
        if self.states:
            new = {admission.row for admission in plan.admissions}
            admitted = np.array([row in new for row in plan.rows.tolist()])
            step.touched.append(self.states.launch(plan, tenants, admitted))
        if plan.host.loads:
            self.host.check_loads(plan, self.table, self.row_of)
        self.in_flight.append(step)
        return step

    def launch_in_part(self, plan: StepPlan, part: float) -> None:
        """The launch fails when so much of the plan's writes to rows, or to the windows' map, has been made."""
        num_writes = int(part * (len(plan.writes.write_rows) + 1))
        at = plan.writes.write_rows[:num_writes], plan.writes.write_columns[:num_writes]
        self.table[at] = plan.writes.write_pages[:num_writes]
        if self.windows:
            num_windows = int(part * (len(plan.windows.map_pages) + 1))
            self.windows.full_to_window[plan.windows.map_pages[:num_windows]] = plan.windows.map_windows[:num_windows]

    def _write_table(self, plan: StepPlan) -> None:
        rows, columns, pages = plan.writes.write_rows, plan.writes.write_columns, plan.writes.write_pages
        if not len(rows):
            return
        if rows.min() <= PAD or pages.min() <= PAD or pages.max() > self.pools.kv.capacity or columns.min() < 0:
            raise RunnerError(f"row write outside the pools: rows {rows}, columns {columns}, pages {pages}")
        self.table[rows, columns] = pages
        if (self.table[rows, columns] != pages).any():
            # torch leaves open which of two writes to one entry wins.
            raise RunnerError(f"one table entry is written twice in a step: rows {rows}, columns {columns}")

    def _move_in(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row = admission.row
            self.tenant[row] = admission.request_id
            self.row_of[admission.request_id] = row
            self.broken.discard(admission.request_id)  # it begins with what is trusted
            self.sampling[row] = False
            self.kv_len[row] = -1
            if list(plan.rows[: plan.num_extends]).count(row) != 1:
                raise RunnerError(f"request {admission.request_id} was admitted and has no extend in step {plan.step}")

    def _check_lengths(self, plan: StepPlan) -> None:
        rows, starts = plan.rows, plan.seq_lens - plan.q_lens
        if len(set(rows.tolist())) != len(rows) or rows.min() <= PAD:
            raise RunnerError(f"step {plan.step} has a row twice, or the padding row: {rows}")
        if (plan.q_lens <= 0).any() or (plan.q_lens[plan.num_extends :] != 1).any():
            raise RunnerError(f"step {plan.step} has wrong query lengths: {plan.q_lens}")
        for row, start in zip(rows[: plan.num_extends].tolist(), starts.tolist(), strict=False):
            if self.kv_len[row] < 0:
                self.kv_len[row] = start
                self.cached.setdefault(int(self.tenant[row]), start)
        if (starts != self.kv_len[rows]).any():
            raise RunnerError(f"step {plan.step} begins at {starts}, the device has KV up to {self.kv_len[rows]}")
        if self.sampling[rows[: plan.num_extends]].any() or not self.sampling[rows[plan.num_extends :]].all():
            raise RunnerError(f"step {plan.step}: a decode without a sampled token, or an extend after one")
        self.kv_len[rows] = plan.seq_lens
        self.sampling[rows] = plan.sample_mask

    def _read_table(self, plan: StepPlan) -> tuple[I64, Mask]:
        """Where the KV of each sequence lies, up to the step's end: locations and mask, [S, L]."""
        longest = int(plan.seq_lens.max())
        pages = self.table[plan.rows, : -(-longest // self.page_size)].astype(np.int64)
        if self.page_size == 1:
            locations = pages
        else:
            inside = self._ladder[: self.page_size]
            locations = (pages[:, :, None] * self.page_size + inside).reshape(len(pages), -1)[:, :longest]
        position = self._ladder[:longest]
        mask = position < plan.seq_lens[:, None]
        fresh = mask & (position >= (plan.seq_lens - plan.q_lens)[:, None])
        if not np.array_equal(locations[fresh], plan.out_cache_loc):
            raise RunnerError(f"out_cache_loc {plan.out_cache_loc} is not the page table's {locations[fresh]}")
        return locations, mask

    def _check_owners(self, plan: StepPlan, locations: I64, mask: Mask, tenants: I64) -> None:
        owner, written = self.pools.kv.owner, plan.out_cache_loc // self.page_size
        writers = np.repeat(tenants, plan.q_lens)
        if (owner[written] != writers).any():
            raise RunnerError(f"step {plan.step} writes pages {written} of {owner[written]} for requests {writers}")
        check_unique("a location", plan.out_cache_loc)
        of = owner[locations // self.page_size]
        if (mask & (of != CACHE) & (of != tenants[:, None])).any():
            raise RunnerError(f"step {plan.step} reads pages that neither its request nor the cache holds")

    # -- what others must leave alone ---------------------------------------------------------------------------------

    def check_in_flight(self) -> None:
        """What a launched step may still touch has not changed hands, and was not freed."""
        for step in self.in_flight:
            for touched in step.touched:
                touched.check(step.plan.step)

    def poison_free(self, pending: Iterable[HostCopy]) -> None:
        """Poison whatever nobody holds, but for what is yet to be copied to the host: `pending` and by the steps in
        flight."""
        saves = [*pending, *(save for step in self.in_flight for save in step.plan.host.saves)]

        def saved(kind: str) -> I64:
            return np.concatenate([_NONE, *(save.slots[kind] for save in saves)])

        self.pages.poison_free(saved("kv"))
        if self.windows:
            self.windows.bytes.poison_free(saved("window"))
        if self.states:
            self.states.bytes.poison_free(saved("state"))

    # -- executing: in the order of the launches ----------------------------------------------------------------------

    def execute(self, step: HashStep, *, fails: bool, poisoned: tuple[int, ...]) -> StepResult:
        if self.in_flight.popleft() is not step:
            raise RunnerError(f"the result of step {step.plan.step} was asked for before those of earlier steps")
        plan = step.plan
        self._settle(plan)
        if fails:
            self._fail(step)
        self.host.save(plan, step.saved_lens, self.broken)
        self.host.drop(plan)
        if self.states:
            self.states.begin(plan)
        self.host.load(plan, self.row_of)
        return self._forward(step, poisoned)

    def _settle(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row, tokens = admission.row, admission.token_ids
            self.last_tokens[row] = NO_TOKEN
            self.seeds[row] = seed_of(admission.params)
            self.salts[row] = self._salt(admission.request_id)
            self.counts[row] = KEY[tokens].sum(dtype=np.uint64)
            self.known[row] = tokens.tolist()
            self.wants_logprob[row] = admission.params.logprobs >= 0

    def _forward(self, step: HashStep, poisoned: tuple[int, ...]) -> StepResult:
        """The model: write what the step's tokens leave, read what is there then, sample."""
        plan = step.plan
        rows, ends = plan.rows, np.cumsum(plan.q_lens)
        tokens = np.concatenate([plan.input_ids, self.last_tokens[rows[plan.num_extends :]]])
        bad = np.zeros(plan.num_seqs, dtype=bool)
        bad[plan.num_extends :] = tokens[len(plan.input_ids) :] == NO_TOKEN
        which = np.repeat(self._ladder[: plan.num_seqs], plan.q_lens)
        inside = np.arange(len(which), dtype=np.int64) - (ends - plan.q_lens)[which]
        digest = self.counts[rows] + self.seeds[rows]
        hidden = chain = self._chain(step, tokens, which, inside, ends)
        if self.model.full:
            self.kv[plan.out_cache_loc] = chain
            self.pages.poison_padding()
            slots = self.kv[step.locations]
            bad |= ((slots == POISON) & step.mask).any(axis=1)
            digest += (slots * WEIGHT[: slots.shape[1]] * step.mask).sum(axis=1, dtype=np.uint64)
        if self.windows and step.windows:
            read, more, gone = self.windows.compute(plan, step.windows, chain)
            bad |= gone
            digest += more
            self._check_windows(step, read)
        if self.states:
            bad |= self.states.bad(plan)
            keys = STATE_KEY[tokens] * (self.salts[rows] | np.uint64(1))[which]
            after, more = self.states.compute(plan, keys, inside, which, ends)
            digest += more
            hidden = chain if self.model.full or self.model.window else after
        garbage = set(step.tenants[bad].tolist()) - self.broken
        if garbage:
            raise RunnerError(
                f"step {plan.step} reads poison, no token or a state of another length for requests {sorted(garbage)}"
            )
        return self._sample(step, digest, hidden, ends, poisoned)

    def _chain(self, step: HashStep, tokens: I64, which: I64, inside: I64, ends: I64) -> U64:
        """The chain values of the step's tokens [T], from what the model keeps of the token before."""
        plan = step.plan
        starts = plan.seq_lens - plan.q_lens
        if self.model.full:
            previous = self.kv[step.locations[self._ladder[: plan.num_seqs], np.maximum(starts - 1, 0)]]
        elif self.windows and step.windows:
            previous = self.windows.chain_before(plan, step.windows)
        else:
            return _NO_WORDS
        before = np.where(starts > 0, previous, self.salts[plan.rows])
        total = np.cumsum(KEY[tokens] * PLACE[starts[which] + inside], dtype=np.uint64)
        offset = before - np.concatenate([np.zeros(1, dtype=np.uint64), total[ends[:-1] - 1]])
        return total + offset[which]

    def _check_windows(self, step: HashStep, read: U64) -> None:
        plan = step.plan
        for i in range(plan.num_extends):
            start = int(plan.seq_lens[i] - plan.q_lens[i])
            if start and int(step.tenants[i]) not in self.broken:
                assert self.windows is not None
                assert step.windows is not None
                row = int(plan.rows[i])
                right = chain_values(np.array(self.known[row][:start]), 0, int(self.salts[row]))
                self.windows.check_content(step.windows, i, start, right, read)

    def _sample(self, step: HashStep, digest: U64, hidden: U64, ends: I64, poisoned: tuple[int, ...]) -> StepResult:
        plan = step.plan
        rows = plan.rows[plan.sample_mask]
        values = mix_array(digest[plan.sample_mask])
        chosen = (values % np.uint64(self.model.vocab)).astype(np.int64)
        self.last_tokens[rows] = chosen
        self.counts[rows] += KEY[chosen]
        for i in poisoned:
            self._spoil(step, i, slice(ends[i] - plan.q_lens[i], ends[i]))
        return StepResult(
            token_ids=chosen.tolist(),
            failed=poisoned,
            logprobs=self._logprobs(rows, chosen, values),
            prompt_logprobs=self._prompt_logprobs(plan, hidden, ends),
        )

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _spoil(self, step: HashStep, i: int, tokens: slice) -> None:
        """Sequence i turned out not finite: garbage wherever the step wrote for it."""
        plan = step.plan
        self.kv[plan.out_cache_loc[tokens]] = POISON
        if self.windows:
            self.windows.bytes.words[plan.windows.out_window_loc[tokens]] = POISON
        if self.states:
            self.states.spoil(np.append(plan.states.snap_slots[plan.states.snap_seqs == i], plan.states.state_slots[i]))
        self.broken.add(int(step.tenants[i]))

    def _fail(self, step: HashStep) -> None:
        """The step stops halfway: whatever it was to write may hold anything."""
        plan = step.plan
        self.kv[plan.out_cache_loc] = POISON
        if self.windows:
            self.windows.bytes.words[plan.windows.out_window_loc] = POISON
        if self.states:
            self.states.spoil(np.concatenate([plan.states.state_slots, plan.states.snap_slots, plan.states.copy_dst]))
        self.host.spoil(plan)
        self.broken.update(step.tenants.tolist())
        raise StepFailed(f"step {plan.step} failed")

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _logprobs(self, rows: I64, chosen: I64, values: U64) -> list[TokenLogprob | None] | None:
        wanted = self.wants_logprob[rows]
        if not wanted.any():
            return None
        return [
            TokenLogprob(token, logprob_of(value), 1) if asked else None
            for token, value, asked in zip(chosen.tolist(), values.tolist(), wanted.tolist(), strict=True)
        ]

    def _prompt_logprobs(self, plan: StepPlan, hidden: U64, ends: I64) -> dict[int, list[TokenLogprob | None]] | None:
        if not plan.prompt_logprobs:
            return None
        entries: dict[int, list[TokenLogprob | None]] = {}
        for i in plan.prompt_logprobs:
            tokens = self.known[int(plan.rows[i])]
            stop, count = int(plan.seq_lens[i]), int(plan.q_lens[i])
            values = hidden[ends[i] - count : ends[i]].tolist()
            entries[i] = [
                TokenLogprob(tokens[p + 1], logprob_of(value), 1) if p + 1 < len(tokens) else None
                for p, value in zip(range(stop - count, stop), values, strict=True)
            ]
        return entries
