"""A runner whose next token is a hash of every KV slot of the sequence, read through the page table.

A wrong, stale or unwritten page, a wrong position, a missing row write or a wrong prefix hit changes the tokens. What
could stay unseen by luck is an error by itself: see `RunnerError`.

Shape letters: S sequences in the step, E of them extends, T tokens, L longest sequence, P pages of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import CACHE, FREE, PAD, Slots
from forebay.requests.step_plan import I64, StepPlan, StepResult, TokenLogprob
from tests.simulation.hashing import KEY, PLACE, U64, WEIGHT, logprob_of, mix_array

POISON: Final = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
NO_TOKEN: Final = -1


class RunnerError(Exception):
    """A plan asked for something no correct plan asks for."""


class StepFailed(RuntimeError):
    """An injected fault: this step did not complete."""


class HashStep:
    """A launched step. Its KV is written and its tokens are sampled when `result` is called, not before: whoever
    believes that a launched step has completed will find poison."""

    def __init__(self, runner: HashRunner, plan: StepPlan, locations: I64, mask: np.ndarray) -> None:
        self.plan, self.locations, self.mask = plan, locations, mask
        self._runner = runner
        self.tenants: I64 = runner.tenant[plan.rows]
        self.written_pages: I64 = plan.out_cache_loc // runner.page_size
        self.writers: I64 = np.repeat(self.tenants, plan.q_lens)
        self.pages_read: I64 = np.unique((locations // runner.page_size)[mask])
        self.generations: I64 = runner.kv_slots.generation[self.pages_read]
        self.row_generations: I64 = runner.row_slots.generation[plan.rows]

    def result(self, *, fails: bool = False, poisoned: tuple[int, ...] = ()) -> StepResult:
        """What the step sampled; with `fails` it raises StepFailed instead and leaves garbage behind. The sequences
        (among the sampling ones) `poisoned` turn out not finite."""
        return self._runner.execute(self, fails=fails, poisoned=poisoned)


class HashRunner:
    """`requests.step_plan.Runner` in numpy. Device state changes by plans only; `kv_slots` and `row_slots` (the
    scheduler's pools) are read to check who owns what, never to compute.

    `salt` gives the salt of a request's namespace: what the adapter or the weights' version would be to a real model.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_slots: Slots,
        row_slots: Slots,
        *,
        vocab: int,
        salt: Callable[[int], int],
    ) -> None:
        ps, rows = config.page_size, config.max_running_requests + 1
        self.page_size, self.vocab, self.kv_slots, self.row_slots = ps, vocab, kv_slots, row_slots
        self.table = np.zeros((rows, -(-config.context_length // ps)), dtype=np.int32)
        self.kv: U64 = np.full((config.num_pages + 1) * ps, POISON, dtype=np.uint64)
        self.last_tokens = np.full(rows, NO_TOKEN, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.salts = np.zeros(rows, dtype=np.uint64)
        self.counts = np.zeros(rows, dtype=np.uint64)
        self.known: list[list[int]] = [[]] * rows
        self.wants_logprob = np.zeros(rows, dtype=bool)
        self.tenant = np.zeros(rows, dtype=np.int64)
        self.kv_len = np.zeros(rows, dtype=np.int64)
        self.sampling = np.zeros(rows, dtype=bool)
        self.broken: set[int] = set()  # requests with garbage in their KV: their tokens must never be seen
        self.cached: dict[int, int] = {}  # where the first extend of each request began
        self.in_flight: deque[HashStep] = deque()
        self._salt = salt
        self._ladder = np.arange(config.context_length + ps, dtype=np.int64)

    # -- launching: in the order of the plans, before the earlier ones completed ---------------------------------------

    def launch(self, plan: StepPlan) -> HashStep:
        self._write_table(plan)
        self._move_in(plan)
        self._check_lengths(plan)
        longest = int(plan.seq_lens.max())
        num_pages = -(-longest // self.page_size)
        pages = self.table[plan.rows, :num_pages].astype(np.int64)
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
        step = HashStep(self, plan, locations, mask)
        self._check_owners(step)
        self.in_flight.append(step)
        return step

    def _write_table(self, plan: StepPlan) -> None:
        rows, columns, pages = plan.write_rows, plan.write_columns, plan.write_pages
        if not len(rows):
            return
        if rows.min() <= PAD or pages.min() <= PAD or pages.max() > self.kv_slots.capacity or columns.min() < 0:
            raise RunnerError(f"row write outside the pools: rows {rows}, columns {columns}, pages {pages}")
        self.table[rows, columns] = pages
        if (self.table[rows, columns] != pages).any():
            # torch leaves open which of two writes to one entry wins.
            raise RunnerError(f"one table entry is written twice in a step: rows {rows}, columns {columns}")

    def _move_in(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row = admission.row
            self.tenant[row] = admission.request_id
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

    def _check_owners(self, step: HashStep) -> None:
        owner = self.kv_slots.owner
        if (owner[step.written_pages] != step.writers).any():
            raise RunnerError(
                f"step {step.plan.step} writes pages {step.written_pages} of {owner[step.written_pages]} "
                f"for requests {step.writers}"
            )
        if len(np.unique(step.plan.out_cache_loc)) != step.plan.num_tokens:
            raise RunnerError(f"step {step.plan.step} writes one location twice: {step.plan.out_cache_loc}")
        of = owner[step.locations // self.page_size]
        if (step.mask & (of != CACHE) & (of != step.tenants[:, None])).any():
            raise RunnerError(f"step {step.plan.step} reads pages that neither its request nor the cache holds")

    def check_in_flight(self) -> None:
        """What a launched step may still touch has not changed hands, and was not freed."""
        owner, generation, rows = self.kv_slots.owner, self.kv_slots.generation, self.row_slots
        for step in self.in_flight:
            if (owner[step.written_pages] != step.writers).any():
                raise RunnerError(f"pages {step.written_pages} were released while step {step.plan.step} writes them")
            if (owner[step.pages_read] <= FREE).any() or (generation[step.pages_read] != step.generations).any():
                raise RunnerError(f"pages {step.pages_read} were released while step {step.plan.step} reads them")
            at = step.plan.rows
            if (rows.owner[at] <= FREE).any() or (rows.generation[at] != step.row_generations).any():
                raise RunnerError(f"rows {at} were released while step {step.plan.step} uses them")

    def poison_free_pages(self) -> None:
        pages = self.kv.reshape(-1, self.page_size)
        pages[self.kv_slots.owner <= FREE] = POISON
        pages[PAD] = POISON

    # -- executing: in the order of the launches ----------------------------------------------------------------------

    def execute(self, step: HashStep, *, fails: bool, poisoned: tuple[int, ...]) -> StepResult:
        if self.in_flight.popleft() is not step:
            raise RunnerError(f"the result of step {step.plan.step} was asked for before those of earlier steps")
        plan = step.plan
        self._settle(plan)
        if fails:
            self.kv[plan.out_cache_loc] = POISON
            self.broken.update(step.tenants.tolist())
            raise StepFailed(f"step {plan.step} failed")
        rows = plan.rows
        tokens = np.concatenate([plan.input_ids, self.last_tokens[rows[plan.num_extends :]]])
        slots = self._compute(step, tokens)
        self._check_read(step, tokens, slots)
        sampled = plan.sample_mask
        digest = (slots * WEIGHT[: slots.shape[1]] * step.mask).sum(axis=1, dtype=np.uint64)[sampled]
        values = mix_array(digest + self.counts[rows[sampled]] + self.seeds[rows[sampled]])
        chosen = (values % np.uint64(self.vocab)).astype(np.int64)
        self.last_tokens[rows[sampled]] = chosen
        self.counts[rows[sampled]] += KEY[chosen]
        self._break(step, poisoned)
        return StepResult(
            token_ids=chosen.tolist(),
            failed=poisoned,
            logprobs=self._logprobs(rows[sampled], chosen, values),
            prompt_logprobs=self._prompt_logprobs(step, slots),
        )

    def _settle(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row, tokens = admission.row, admission.token_ids
            self.last_tokens[row] = NO_TOKEN
            self.seeds[row] = admission.params.seed
            self.salts[row] = self._salt(admission.request_id)
            self.counts[row] = KEY[np.array(tokens)].sum(dtype=np.uint64)
            self.known[row] = list(tokens)
            self.wants_logprob[row] = admission.params.logprobs >= 0

    def _compute(self, step: HashStep, tokens: I64) -> U64:
        """Write the step's KV; returns the slots [S, L] of every sequence as they are afterwards."""
        plan = step.plan
        starts, ends = plan.seq_lens - plan.q_lens, np.cumsum(plan.q_lens)
        at = self._ladder[: plan.num_seqs]
        previous = self.kv[step.locations[at, np.maximum(starts - 1, 0)]]
        before = np.where(starts > 0, previous, self.salts[plan.rows])
        which = np.repeat(at, plan.q_lens)
        positions = self._positions(starts, ends, plan.q_lens, which)
        total = np.cumsum(KEY[tokens] * PLACE[positions], dtype=np.uint64)
        offset = before - np.concatenate([np.zeros(1, dtype=np.uint64), total[ends[:-1] - 1]])
        self.kv[plan.out_cache_loc] = total + offset[which]
        self.kv[: self.page_size] = POISON
        return self.kv[step.locations]

    @staticmethod
    def _positions(starts: I64, ends: I64, q_lens: I64, which: I64) -> I64:
        return np.arange(len(which), dtype=np.int64) + (starts - ends + q_lens)[which]

    def _check_read(self, step: HashStep, tokens: I64, slots: U64) -> None:
        bad = ((slots == POISON) & step.mask).any(axis=1)
        bad[step.plan.num_extends :] |= tokens[len(step.plan.input_ids) :] == NO_TOKEN
        garbage = set(step.tenants[bad].tolist()) - self.broken
        if garbage:
            raise RunnerError(f"step {step.plan.step} reads poison or no token for requests {sorted(garbage)}")

    def _break(self, step: HashStep, poisoned: tuple[int, ...]) -> None:
        sampling = np.flatnonzero(step.plan.sample_mask)
        ends = np.cumsum(step.plan.q_lens)
        for i in sampling[list(poisoned)].tolist():
            self.kv[step.plan.out_cache_loc[ends[i] - step.plan.q_lens[i] : ends[i]]] = POISON
            self.broken.add(int(step.tenants[i]))

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _logprobs(self, rows: I64, chosen: I64, values: U64) -> list[TokenLogprob | None] | None:
        wanted = self.wants_logprob[rows]
        if not wanted.any():
            return None
        return [
            TokenLogprob(token, logprob_of(value), 1) if asked else None
            for token, value, asked in zip(chosen.tolist(), values.tolist(), wanted.tolist(), strict=True)
        ]

    def _prompt_logprobs(self, step: HashStep, slots: U64) -> dict[int, list[TokenLogprob | None]] | None:
        plan = step.plan
        if not plan.prompt_logprobs:
            return None
        entries: dict[int, list[TokenLogprob | None]] = {}
        for i in plan.prompt_logprobs:
            tokens = self.known[int(plan.rows[i])]
            stop = int(plan.seq_lens[i])
            chunk = range(stop - int(plan.q_lens[i]), stop)
            entries[i] = [
                TokenLogprob(tokens[p + 1], logprob_of(int(slots[i, p])), 1) if p + 1 < len(tokens) else None
                for p in chunk
            ]
        return entries
