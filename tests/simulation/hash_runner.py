"""A runner whose next token is a hash of all that layers keep: every KV slot of the sequence, read through the page
table, those of its last window, read through the window map, and its recurrent state.

A wrong, stale or unwritten page or slot, a wrong position, a missing row write or a wrong prefix hit changes the
tokens. What could stay unseen by luck is an error by itself: see `RunnerError`.

Shape letters: S sequences in the step, X of them extends, T tokens, Q of them that are sampled from, L longest
sequence, P its pages, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from forebay.base.parts import I64, Mask
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import CACHE, PAD
from forebay.requests.sampling_params import Pooling, PoolingKind
from forebay.requests.step_plan import HostCopy, StepPlan, StepResult, TierCopy, TokenLogprob
from tests.simulation.cache_tiers import TierMemory, check_targets
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, check_unique, some
from tests.simulation.hash_step import HashStep, Pools
from tests.simulation.hashing import (
    KEY,
    NO_ROWS,
    PLACE,
    STATE_KEY,
    STATE_WEIGHT,
    U64,
    WEIGHT,
    HashModel,
    Rows,
    chain_of,
    keys_of,
    logprob_of,
    mix_array,
    seed_of,
    vector_of,
)
from tests.simulation.host_memory import HostMemory
from tests.simulation.restricted import Restricted
from tests.simulation.row_lengths import RowLengths
from tests.simulation.state_memory import StateMemory
from tests.simulation.window_memory import WindowMemory

NO_TOKEN: Final = -1
_NONE: Final = np.empty(0, dtype=np.int64)
_NO_WORDS: Final = np.empty(0, dtype=np.uint64)

Propose = Callable[[int, int, int], list[int]]
"""Of a request's id: so many tokens that may stand from this position on."""


TakeMasks = Callable[[int], list[I64]]
"""Of a step's number: the tokens that may come at each of its positions under a grammar."""


class StepFailed(RuntimeError):
    """An injected fault: this step did not complete."""


class HashRunner:
    """`requests.step_plan.Runner` in numpy. Device state changes by plans only.

    `salt` gives the salt of a request's namespace: what the adapter or the weights' version would be to a real model.
    `propose` is there where draft tokens are made on the device.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: Pools,
        model: HashModel,
        *,
        salt: Callable[[int], int],
        propose: Propose | None = None,
        take_masks: TakeMasks | None = None,
    ) -> None:
        ps, rows = config.page_size, pools.rows.num_rows
        self.page_size, self.pools, self.model = ps, pools, model
        self.table = np.zeros((rows, -(-config.context_length // ps)), dtype=np.int32)
        self.pages = SlotBytes(pools.kv, ps)
        self.kv = self.pages.words
        self.windows = WindowMemory(pools.windows, pools.kv, ps, config.context_length) if pools.windows else None
        self.states = StateMemory(pools.states) if pools.states else None
        self.host = HostMemory(self.pages, self.windows, self.states)
        self.cache_tiers = TierMemory(self, config)
        self.last_tokens = np.full(rows, NO_TOKEN, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.salts = np.zeros(rows, dtype=np.uint64)
        self.counts = np.zeros(rows, dtype=np.uint64)
        self.known: list[list[int]] = [[]] * rows
        self.restricted: list[Restricted | None] = [None] * rows
        self.wants_logprob = np.zeros(rows, dtype=bool)
        self.pooling: list[Pooling | None] = [None] * rows
        self.pooled = np.zeros(rows, dtype=np.uint64)
        self.tenant = np.zeros(rows, dtype=np.int64)
        self.row_of: dict[int, int] = {}
        self.arrived: dict[int, int] = {}  # tokens of requests whose prompts another engine has computed
        self.lengths = RowLengths(rows)
        self.draft_tokens = np.full((rows, config.speculation.num_draft_tokens - 1), NO_TOKEN, dtype=np.int64)
        self.sampling = np.zeros(rows, dtype=bool)
        self.broken: set[int] = set()  # requests with garbage in their KV or state: their tokens must never be seen
        self.cached: dict[int, int] = {}  # where the first extend of each request began
        self.in_flight: deque[HashStep] = deque()
        self._salt, self._propose, self._take_masks = salt, propose, take_masks
        self._ladder = np.arange(config.context_length + ps, dtype=np.int64)

    # -- launching: in the order of the plans, before the earlier ones completed ---------------------------------------

    def launch(self, plan: StepPlan) -> HashStep:
        saved_rows = [self.row_of.get(save.request_id, PAD) for save in plan.host.saves]
        self._check_sequences(plan)
        self._write_table(plan)
        if self.windows:
            self.windows.write_map(plan)
        self._move_in(plan)
        self._check_turns(plan)
        tenants = self.tenant[plan.rows]
        span = self.lengths.launch(plan, tenants)
        pages = self.table[plan.rows, : -(-max(span.ends.tolist(), default=0) // self.page_size)].astype(np.int64)
        step = HashStep(self, plan, span, pages, saved_rows)
        self._check_owners(step)
        if self.windows:
            step.windows = self.windows.launch(plan, span, self.table)
        if self.states:
            new = {admission.row for admission in plan.admissions if not admission.prebuilt}
            admitted = np.array([row in new for row in plan.rows.tolist()])
            step.others.append(self.states.launch(plan, span, admitted))
        if plan.host.loads:
            self.host.check_loads(plan, self.table, self.row_of)
        if plan.host.fetches:
            check_targets(plan, self)
        self.in_flight.append(step)
        return step

    def launch_in_part(self, plan: StepPlan, part: float) -> None:
        """The launch fails when so much of the plan's writes to rows, or to the windows' map, has been made."""
        num_writes = int(part * (len(plan.writes.write_rows) + 1))
        at = plan.writes.write_rows[:num_writes], plan.writes.write_columns[:num_writes]
        self.table[at] = plan.writes.write_pages[:num_writes]
        if self.windows:
            num_windows = int(part * (len(plan.kinds.window.map_pages) + 1))
            self.windows.full_to_window[plan.kinds.window.map_pages[:num_windows]] = plan.kinds.window.map_windows[
                :num_windows
            ]

    def forget_pictures(self, plan: StepPlan) -> None:
        """Forget what the encoder has begun of pictures that nobody wants any more."""

    def _check_sequences(self, plan: StepPlan) -> None:
        """Each row once, every one with tokens; of a decode the drafts are here if the host proposes, and only
        then."""
        rows, q_lens = plan.rows, plan.q_lens
        ids = rows.tolist()
        if len(set(ids)) != len(ids) or min(ids, default=1) <= PAD:
            raise RunnerError(f"step {plan.step} has a row twice, or the padding row: {rows}")
        most = self.draft_tokens.shape[1] + 1 if not plan.num_extends else 1
        lens = q_lens.tolist()
        if min(lens, default=1) <= 0 or max(lens[plan.num_extends :], default=1) > most:
            raise RunnerError(f"step {plan.step} has wrong query lengths: {q_lens}")
        drafted = 0 if self._propose else int((q_lens[plan.num_extends :] - 1).sum())
        vocab = self.model.vocab
        if len(plan.drafts) != drafted or not all(0 <= token < vocab for token in plan.drafts.tolist()):
            raise RunnerError(f"step {plan.step} has {drafted} drafts of a vocabulary of {vocab}: {plan.drafts}")

    def _write_table(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self.table[admission.row] = PAD  # whatever its tenant has not been given
        rows, columns, pages = plan.writes.write_rows, plan.writes.write_columns, plan.writes.write_pages
        if not len(rows):
            return
        if rows.min() <= PAD or pages.min() <= PAD or pages.max() > self.pools.kv.capacity or columns.min() < 0:
            raise RunnerError(f"row write outside the pools: rows {rows}, columns {columns}, pages {pages}")
        self.table[rows, columns] = pages
        if some(self.table[rows, columns] != pages):
            # torch leaves open which of two writes to one entry wins.
            raise RunnerError(f"one table entry is written twice in a step: rows {rows}, columns {columns}")

    def _move_in(self, plan: StepPlan) -> None:
        extends = plan.rows[: plan.num_extends].tolist()
        for admission in plan.admissions:
            row = admission.row
            self.tenant[row] = admission.request_id
            self.row_of[admission.request_id] = row
            self.broken.discard(admission.request_id)  # it begins with what is trusted
            self.sampling[row] = admission.prebuilt
            if admission.prebuilt:
                continue
            if row not in extends:
                raise RunnerError(f"request {admission.request_id} was admitted and has no extend in step {plan.step}")
            self.cached.setdefault(admission.request_id, int(plan.starts[extends.index(row)]))

    def _check_turns(self, plan: StepPlan) -> None:
        """Who has a sampled token decodes, and nobody else."""
        rows = plan.rows
        if some(self.sampling[rows] != (self._ladder[: plan.num_seqs] >= plan.num_extends)):
            raise RunnerError(f"step {plan.step}: a decode without a sampled token, or an extend after one")
        self.sampling[rows] = plan.sample_mask

    def locations(self, pages: I64) -> I64:
        """Where the KV lies of the tokens [S, L] that belong into pages [S, P]."""
        if self.page_size == 1:
            return pages
        locations: I64 = pages[:, :, None] * self.page_size + self._ladder[: self.page_size]
        return locations.reshape(len(pages), pages.shape[1] * self.page_size)

    def _check_owners(self, step: HashStep) -> None:
        """Of the pages that the step may write or read."""
        plan, span, owner = step.plan, step.span, self.pools.kv.owner
        of, tenants = owner[step.locations // self.page_size], step.tenants[:, None]
        position = self._ladder[: of.shape[1]]
        read = position < span.ends[:, None]
        written = read & (position >= span.least[:, None])
        if some(written & (of != tenants)):
            raise RunnerError(f"step {plan.step} writes pages {step.pages} that {step.tenants} do not hold")
        check_unique("a location", step.locations[written])
        if some(read & (of != CACHE) & (of != tenants)):
            raise RunnerError(f"step {plan.step} reads pages that neither its request nor the cache holds")

    # -- what others must leave alone ---------------------------------------------------------------------------------

    def check_in_flight(self) -> None:
        """What a launched step may still touch has not changed hands, and was not freed."""
        for step in self.in_flight:
            for touched in step.touched:
                touched.check(step.plan.step)

    def poison_free(self, pending: Iterable[HostCopy | TierCopy]) -> None:
        """Poison whatever nobody holds, but for what is yet to be copied to the host: `pending` and by the steps in
        flight."""
        plans = [step.plan.host for step in self.in_flight]
        saves: list[HostCopy | TierCopy] = [*pending]
        for host in plans:
            saves += [*host.saves, *host.stores]

        def saved(kind: str) -> I64:
            return np.concatenate([_NONE, *(save.slots[kind] for save in saves)])

        self.pages.poison_free(saved("kv"))
        if self.windows:
            self.windows.bytes.poison_free(saved("window"))
        if self.states:
            self.states.bytes.poison_free(saved("state"))

    # -- executing: in the order of the launches ----------------------------------------------------------------------

    def execute(self, step: HashStep, *, fails: bool, poisoned: Mapping[int, int]) -> StepResult:
        if self.in_flight.popleft() is not step:
            raise RunnerError(f"the result of step {step.plan.step} was asked for before those of earlier steps")
        plan = step.plan
        saved_lens = [
            int(self.lengths.kv_lens[row]) if row else self.arrived[save.request_id]
            for row, save in zip(step.saved_rows, plan.host.saves, strict=True)
        ]
        self._settle(plan)
        step.begin(self.lengths.begin(plan))
        if fails:
            self._fail(step)
        self.host.save(plan, saved_lens, self.broken)
        lost = self.cache_tiers.store(plan)
        self.host.drop(plan)
        if self.states:
            self.states.begin(plan)
        self.host.load(plan, self.row_of)
        lost += self.cache_tiers.fetch(plan)
        return replace(self._forward(step, poisoned), lost=lost)

    def _settle(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row, tokens = admission.row, admission.token_ids
            self.last_tokens[row] = self.draft_tokens[row] = NO_TOKEN
            if admission.prebuilt:
                self.last_tokens[row] = tokens[-1]
                self.lengths.kv_lens[row] = admission.kv_len
            self.seeds[row] = seed_of(admission.params)
            self.salts[row] = self._salt(admission.request_id)
            self.counts[row] = KEY[tokens].sum(dtype=np.uint64)
            self.known[row] = tokens.tolist()
            wanted, output = admission.params, tokens[admission.num_prompt :].tolist()
            self.restricted[row] = (
                Restricted(wanted, self.model.vocab, admission.stop_ids, output) if wanted.restricts else None
            )
            self.wants_logprob[row] = admission.params.logprobs >= 0
            self.pooling[row], self.pooled[row] = admission.params.pooling, 0

    def _forward(self, step: HashStep, poisoned: Mapping[int, int]) -> StepResult:
        """The model: write what the step's tokens leave, read what is there then, sample, and go on from what is
        accepted."""
        plan, starts, which = step.plan, step.starts, step.which
        if not plan.num_seqs:
            return StepResult(token_ids=[])
        tokens = self._tokens(step)
        bad = np.zeros(plan.num_seqs, dtype=bool)
        bad[which[tokens == NO_TOKEN]] = True
        of, position = which[step.sampled], (starts[which] + step.inside)[step.sampled]
        digest = self._known(step, tokens)[step.sampled]
        hidden = chain = self._chain(step, tokens)
        if self.model.full:
            self.kv[step.out_cache_loc] = chain
            self.pages.poison_padding()
            slots = self.kv[step.locations]
            ladder, weight = self._ladder[: slots.shape[1]], WEIGHT[: slots.shape[1]]
            bad |= ((slots == POISON) & (ladder < (starts + plan.q_lens)[:, None])).any(axis=1)
            digest += (slots[of] * weight * (ladder <= position[:, None])).sum(axis=1, dtype=np.uint64)
        if self.windows and step.windows:
            read, more, gone = self.windows.compute(step, chain, position)
            bad |= gone
            digest += more
            self._check_windows(step, read)
        if self.states:
            bad |= self.states.bad(plan, starts)
            keys = self._state_keys(step, tokens) * (self.salts[plan.rows] | np.uint64(1))[which]
            step.states = self.states.scan(plan, keys, step.inside, which)
            digest += step.states[step.sampled] * np.uint64(STATE_WEIGHT)
            hidden = chain if self.model.full or self.model.window else step.states
        garbage = set(step.tenants[bad].tolist()) - self.broken
        if garbage:
            raise RunnerError(
                f"step {plan.step} reads poison, no token or a state of another length for requests {sorted(garbage)}"
            )
        return self._sample(step, tokens, self._values(step, digest), hidden, poisoned)

    def _values(self, step: HashStep, digest: U64) -> U64:
        """What is sampled from [Q], of the digests of what is known there [Q]."""
        return mix_array(digest)

    def _tokens(self, step: HashStep) -> I64:
        """The tokens that the step computes [T]."""
        plan, decoded = step.plan, slice(len(step.plan.input_ids), None)
        rows, inside = plan.rows[step.which[decoded]], step.inside[decoded]
        tokens, drafted = self.last_tokens[rows], inside > 0
        if self._propose:
            tokens[drafted] = self.draft_tokens[rows[drafted], inside[drafted] - 1]
        else:
            tokens[drafted] = plan.drafts
        return np.concatenate([plan.input_ids, tokens])

    def _keys(self, step: HashStep, tokens: I64) -> U64:
        """The keys of the step's tokens [T]."""
        return KEY[tokens]

    def _state_keys(self, step: HashStep, tokens: I64) -> U64:
        return STATE_KEY[tokens]

    def _rows_of(self, tenant: int) -> Rows:
        """The rows of encodings in a request's prompt."""
        return NO_ROWS

    def _known(self, step: HashStep, tokens: I64) -> U64:
        """Of each token [T], the counts of what is known behind it, drafts up to it among that, and the seed."""
        known = (self.counts + self.seeds)[step.plan.rows][step.which]
        if step.plan.width > 1:
            keys = np.where(step.inside > 0, KEY[tokens], np.uint64(0))
            keys[: len(step.plan.input_ids)] = 0
            total: U64 = np.cumsum(keys, dtype=np.uint64)
            known += total - total[step.firsts][step.which]
        return known

    def _chain(self, step: HashStep, tokens: I64) -> U64:
        """The chain values of the step's tokens [T], from what the model keeps of the token before."""
        plan, starts, which = step.plan, step.starts, step.which
        if self.model.full:
            previous = self.kv[step.locations[self._ladder[: plan.num_seqs], np.maximum(starts - 1, 0)]]
        elif self.windows and step.windows:
            previous = self.windows.chain_before(step.windows, starts)
        else:
            return _NO_WORDS
        before = np.where(starts > 0, previous, self._origins(plan.rows))
        keys = self._keys(step, tokens) * PLACE[starts[which] + step.inside]
        total = np.cumsum(keys, dtype=np.uint64)
        offset = before - (total - keys)[step.firsts]
        chain: U64 = total + offset[which]
        return chain

    def _origins(self, rows: I64) -> U64:
        """The chain values in front of the first tokens of these rows [S]."""
        return self.salts[rows]

    def _content(self, chain: U64) -> U64:
        """What this device has in the places of these chain values."""
        return chain

    def _check_windows(self, step: HashStep, read: U64) -> None:
        plan = step.plan
        for i, start in enumerate(plan.starts.tolist()):
            if start and int(step.tenants[i]) not in self.broken:
                assert self.windows is not None
                assert step.windows is not None
                row = int(plan.rows[i])
                keys = keys_of(np.array(self.known[row][:start]), self._rows_of(int(step.tenants[i])))
                right = self._content(chain_of(keys, 0, int(self.salts[row])))
                self.windows.check_content(step.windows, i, start, right, read)

    def _accept(self, step: HashStep, tokens: I64, chosen: I64) -> I64:
        """How many of each sequence's tokens count [S]: of a decode's drafts those that were sampled in front of
        them."""
        plan = step.plan
        accepted = plan.q_lens.copy()
        if plan.width > 1:
            for i in range(plan.num_seqs):  # there are no extends
                mine = slice(step.firsts[i], step.firsts[i] + plan.q_lens[i])
                wrong = np.flatnonzero(tokens[mine][1:] != chosen[mine][:-1])
                accepted[i] = wrong[0] + 1 if len(wrong) else plan.q_lens[i]
        return accepted

    def _sample(self, step: HashStep, tokens: I64, values: U64, hidden: U64, poisoned: Mapping[int, int]) -> StepResult:
        """Sample from `values` [Q]; rows go on from what of it counts."""
        plan, which, vectors = step.plan, step.which, self._pool(step, values, hidden)
        chosen = (values % np.uint64(self.model.vocab)).astype(np.int64)
        if len(plan.masked):
            self._choose_allowed(step, chosen, values)
        self._choose_restricted(step, tokens, chosen, values)
        accepted = self._accept(step, tokens, chosen)
        failed = tuple(i for i, at in poisoned.items() if at < accepted[i])
        for i in failed:  # nothing is chosen there: a token that is wrong for certain
            accepted[i] = plan.q_lens[i] if i < plan.num_extends else poisoned[i] + 1
            chosen[step.sampled == step.firsts[i] + accepted[i] - 1] += 1
        chosen %= self.model.vocab
        kept = self._kept(step, accepted)
        rows, chosen, values = plan.rows[which[step.sampled]][kept], chosen[kept], values[kept]
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            if self.restricted[row]:
                self.restricted[row].read(token)
        self._go_on(step, rows, chosen, accepted, failed)
        self._draft(step)
        return StepResult(
            token_ids=chosen.tolist(),
            num_new=accepted.tolist() if plan.width > 1 else None,
            failed=failed,
            logprobs=self._logprobs(rows, chosen, values),
            prompt_logprobs=self._prompt_logprobs(step, hidden),
            vectors=vectors,
        )

    def _kept(self, step: HashStep, accepted: I64) -> Mask:
        """Of what was sampled, which tokens count [Q]."""
        plan = step.plan
        kept: Mask = (step.inside < accepted[step.which])[step.sampled]
        kept[: plan.num_extends] = plan.sample_mask[: plan.num_extends]
        return kept

    def _go_on(self, step: HashStep, rows: I64, chosen: I64, accepted: I64, failed: Iterable[int]) -> None:
        """The rows continue with the tokens `chosen`, of which a row may have several."""
        self.last_tokens[rows] = chosen  # where a row has several the last one stays
        np.add.at(self.counts, rows, KEY[chosen])
        self._forget(step, step.inside >= accepted[step.which])
        if self.states:
            self.states.advance(step, accepted)
        for i in failed:
            self._spoil(step, i)
        self._advance(step, accepted)

    def _choose_allowed(self, step: HashStep, chosen: I64, values: U64) -> None:
        assert self._take_masks is not None
        masks, of = iter(self._take_masks(step.plan.step)), step.which[step.sampled]
        for i in step.plan.masked.tolist():
            for at in np.flatnonzero(of == i).tolist():
                allowed = next(masks)
                chosen[at] = allowed[int(values[at]) % len(allowed)]

    def _choose_restricted(self, step: HashStep, tokens: I64, chosen: I64, values: U64) -> None:
        for i, row in enumerate(step.plan.rows.tolist()):
            mine = self.restricted[row]
            for at in np.flatnonzero(step.which[step.sampled] == i).tolist() if mine else ():
                place, first = int(step.sampled[at]), int(step.firsts[i])
                drafts = tokens[first + 1 : place + 1].tolist() if i >= step.plan.num_extends else []
                allowed = mine.behind(drafts).allowed
                chosen[at] = allowed[int(values[at]) % len(allowed)]

    def _pool(self, step: HashStep, values: U64, hidden: U64) -> dict[int, bytes] | None:
        """What pooled prompts become that end, given the hashes behind each sequence's last token and what is at each
        token."""
        plan, vectors = step.plan, {}
        for i in plan.pooled:
            row, first, start = int(plan.rows[i]), int(step.firsts[i]), int(plan.starts[i])
            own, pooling = hidden[first : first + int(plan.q_lens[i])], self.pooling[row]
            if pooling is None:
                raise RunnerError(f"step {plan.step} pools sequence {i}, which does not want that")
            match pooling.kind:
                case PoolingKind.MEAN:
                    self.pooled[row : row + 1] += own.sum(dtype=np.uint64)
                case PoolingKind.CLS if start == 0:
                    self.pooled[row] = own[0]
                case PoolingKind.LAST:
                    self.pooled[row] = values[i]
            if plan.ends[i] == len(self.known[row]):
                vectors[i] = vector_of(int(self.pooled[row]))
        return vectors or None

    def _advance(self, step: HashStep, accepted: I64) -> None:
        self.lengths.advance(step.span, accepted, [later.span for later in self.in_flight])

    def _draft(self, step: HashStep) -> None:
        """Propose what follows the last token of each sequence that has one."""
        plan = step.plan
        propose = self._propose
        if propose is None:
            return
        for i in np.flatnonzero(plan.sample_mask).tolist():
            at = int(self.lengths.kv_lens[plan.rows[i]]) + 1
            self.draft_tokens[plan.rows[i]] = propose(int(step.tenants[i]), at, self.draft_tokens.shape[1])

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _forget(self, step: HashStep, tokens: Mask) -> None:
        """Nobody may read again what the step wrote of these tokens [T]."""
        self.kv[step.out_cache_loc[tokens]] = POISON
        if self.windows and step.windows:
            self.windows.bytes.words[step.out_window_loc[tokens]] = POISON

    def _spoil(self, step: HashStep, i: int) -> None:
        """Sequence i turned out not finite: garbage wherever the step wrote for it."""
        self._forget(step, step.which == i)
        if self.states:
            self.states.spoil(step, np.array([i]))
        self.broken.add(int(step.tenants[i]))

    def _fail(self, step: HashStep) -> None:
        """The step stops halfway: whatever it was to write may hold anything."""
        plan = step.plan
        self._forget(step, step.inside >= 0)
        if self.states:
            self.states.spoil(step, np.arange(plan.num_seqs))
            self.states.spoil_slots(plan.kinds.state.copy_dst)
        self.host.spoil(plan)
        self.cache_tiers.spoil(plan)
        self.broken.update(step.tenants.tolist())
        self._advance(step, np.where(step.span.decodes, 1, plan.q_lens))
        raise StepFailed(f"step {plan.step} failed")

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _logprobs(self, rows: I64, chosen: I64, values: U64) -> list[TokenLogprob | None] | None:
        wanted = self.wants_logprob[rows]
        if not some(wanted):
            return None
        return [
            TokenLogprob(token, logprob_of(value), 1) if asked else None
            for token, value, asked in zip(chosen.tolist(), values.tolist(), wanted.tolist(), strict=True)
        ]

    def _prompt_logprobs(self, step: HashStep, hidden: U64) -> dict[int, list[TokenLogprob | None]] | None:
        plan = step.plan
        if not plan.prompt_logprobs:
            return None
        entries: dict[int, list[TokenLogprob | None]] = {}
        for i in plan.prompt_logprobs:
            tokens = self.known[int(plan.rows[i])]
            start, first = int(plan.starts[i]), int(step.firsts[i])
            values = hidden[first : first + int(plan.q_lens[i])].tolist()
            entries[i] = [
                TokenLogprob(tokens[p + 1], logprob_of(value), 1) if p + 1 < len(tokens) else None
                for p, value in enumerate(values, start)
            ]
        return entries
