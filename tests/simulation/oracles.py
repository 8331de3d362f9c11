"""What must hold, checked against the reference and against each request's own history."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

import numpy as np

from forebay.base.parts import I32
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.radix_node import Node
from forebay.memory.slots import PAD
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import PoolingKind
from forebay.requests.updates import CacheReport, Failure, FinishReason, MissReason, Update
from forebay.scheduler.scheduler import Scheduler
from tests.kinds_of import num_states, num_window_pages, states_of, windows_of
from tests.simulation.event_log import logged
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hashing import (
    NO_ROWS,
    U64,
    Generated,
    HashModel,
    Rows,
    chain_of,
    keys_of,
    logprob_of,
    salt_of,
    state_keys_of,
    states_after,
    windowed,
)
from tests.simulation.liveness import Liveness, Violation, require
from tests.simulation.proposers import reference


def namespace_of(req: Request) -> str:
    """Return what the tokens of a request depend on beside its prompt: what its cache must be separated by."""
    weights = f"{req.weight_version}+{req.adapter.number}" if req.adapter else str(req.weight_version)
    return f"{weights}/{req.namespace}"


class Tracked:
    """A request, what its client has heard, and what it must hear."""

    def __init__(
        self,
        req: Request,
        model: HashModel,
        config: SchedulerConfig,
        now: float,
        salt: int,
        rows: Rows = NO_ROWS,
    ) -> None:
        self.model, self.config = model, config
        self.id, self.params, self.namespace, self.tenant = req.id, req.params, req.namespace, req.tenant
        self.room = req.rendezvous.room if req.rendezvous else 0  # which it shares with its other half; 0 without one
        self.prompt, self.rows = req.tokens.tolist(), rows
        if config.pictures:
            self.prompt = [config.pictures.placeholder if at in rows else id for at, id in enumerate(self.prompt)]
        self.salt = salt
        self.finish: FinishReason | None = None
        self.may_abort = self.may_fail = self.may_stop = self.may_lose_adapter = False
        self.begin_again()

    def begin_again(self) -> None:
        """As far as the client knows; with other weights, if the salt is another now."""
        self.expected: Iterator[Generated] = reference(
            self.model, self.prompt, self.params, salt=self.salt, rows=self.rows
        )
        self.received: list[int] = []
        self.report: CacheReport | None = None
        self.breaks_at: int | None = None  # so many tokens come before something that is not finite

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.received

    @property
    def cached_tokens(self) -> int | None:
        return self.report.cached_tokens if self.report else None

    def take(self, update: Update, now: float, cached: int | None) -> None:
        """Check one update against everything that was promised."""
        if self.finish is not None:
            raise Violation(f"request {self.id} heard {update} after it had ended with {self.finish}")
        if len(update.token_ids) > self.config.speculation.num_draft_tokens:
            raise Violation(f"request {self.id}: one step brought {update.token_ids}")
        first = not self.received
        if update.vector:
            self._take_vector(update, cached)
        for i, token in enumerate(update.token_ids):
            self._take_token(token, update, i)
        if first and update.token_ids:
            self._check_first(update, cached)
        self._check_finish(update)

    def _take_vector(self, update: Update, cached: int | None) -> None:
        pooling = self.params.pooling
        if pooling is None or update.finish is not FinishReason.STOP:
            raise Violation(f"request {self.id} wants {pooling} and heard {update}")
        right = self.model.vector(self.prompt, pooling.kind, salt=self.salt, rows=self.rows)
        require(update.vector == right, f"request {self.id}: {pooling} gives {update.vector!r}, not {right!r}")
        self._check_first(update, cached)

    def _take_token(self, token: int, update: Update, i: int) -> None:
        if self._is_stopped or self._is_full:
            raise Violation(f"request {self.id} got a token behind its last one: {update}")
        if len(self.received) == self.breaks_at:
            raise Violation(f"request {self.id} got a token that nothing chose: {update}")
        right = next(self.expected)
        if token != right.token_id:
            raise Violation(
                f"request {self.id}: token {len(self.received)} is {token}, the reference says {right.token_id}"
            )
        self.received.append(token)
        if self.params.logprobs >= 0:
            heard = [(entry.token_id, entry.logprob) for entry in update.logprobs or []]
            require(
                len(heard) == len(update.token_ids) and heard[i] == (token, right.logprob),
                f"request {self.id}: log-probabilities {heard}, token {i}'s is {right.logprob}",
            )
        elif update.logprobs is not None:
            raise Violation(f"request {self.id} did not ask for {update.logprobs}")

    def _check_first(self, update: Update, cached: int | None) -> None:
        report = update.cache
        assert report is not None, f"request {self.id}: its first token came without a cache report"
        self.report = report
        require(
            report.cached_tokens == cached,
            f"request {self.id}: {report.cached_tokens} tokens reported as cached, the device began at {cached}",
        )
        require(report.cached_tokens < len(self.prompt), f"request {self.id}: the whole prompt is said to be cached")
        self._check_report(report)
        if self._pools_more_than_the_last:
            require(report.miss_reason in (MissReason.POOLING, MissReason.DISABLED), f"miss {report.miss_reason}")
        if self.params.prompt_logprobs >= 0:
            reasons = (MissReason.PROMPT_LOGPROBS, MissReason.DISABLED)
            require(report.miss_reason in reasons, f"miss {report.miss_reason}")
            self._check_prompt_logprobs(update)

    def _check_prompt_logprobs(self, update: Update) -> None:
        hidden = self.model.hidden(np.array(self.prompt, dtype=np.int32), self.salt, self.rows).tolist()
        right = [None, *zip(self.prompt[1:], map(logprob_of, hidden[:-1]), strict=True)]
        right = [None if at in self.rows else entry for at, entry in enumerate(right)]
        heard = [entry and (entry.token_id, entry.logprob) for entry in update.prompt_logprobs or []]
        require(heard == right, f"request {self.id}: prompt log-probabilities {heard}, not {right}")

    def _check_report(self, report: CacheReport) -> None:
        """The kinds agree with each other, and the reason with them (C20)."""
        state, windowed, ps = self.config.kinds, bool(self.model.window), self.config.page_size
        end = (len(self.prompt) - 1) // ps * ps
        cached, kv = report.cached_tokens, report.kv_tokens
        state_tokens = report.resumable.get("state", kv)
        window_tokens = report.resumable.get("window", kv)
        require(
            cached <= min(state_tokens, window_tokens)
            and max(state_tokens, window_tokens) <= kv <= end
            and bool(num_states(state)) == ("state" in report.resumable)
            and windowed == ("window" in report.resumable)
            and (cached == kv or bool(num_states(state)) or windowed),
            f"request {self.id}: the kinds disagree in {report}",
        )
        short = {
            MissReason.NONE: cached == end > 0,
            MissReason.DISABLED: not self.config.radix_cache and kv == 0,
            MissReason.PROMPT_LOGPROBS: self.params.prompt_logprobs >= 0 and kv == 0,
            MissReason.POOLING: self._pools_more_than_the_last and kv == 0,
            MissReason.BELOW_PAGE: end == 0,
            MissReason.EMPTY: kv == 0 < end,
            MissReason.NOT_LOADED_IN_TIME: bool(self.config.tiers) and cached < end,
            # Of a state that is there, too: a hit is given up before its request waits for a slot for its own.
            MissReason.STATE_MISSING: cached < kv and (state_tokens < kv or cached == 0),
            MissReason.WINDOW_MISSING: cached < kv and window_tokens < kv,
        }
        require(short.get(report.miss_reason, cached == kv < end), f"request {self.id}: {report} has no such reason")
        at = report.differs_at
        require(
            at == -1
            or (
                kv <= at < len(self.prompt)
                and report.token_here == self.prompt[at]
                and (report.token_there != report.token_here or self._is_placeholder(report.token_here))
                and 0 <= report.token_there < self.model.vocab
            ),
            f"request {self.id}: {report} is not where its prompt leaves another",
        )

    def _is_placeholder(self, token: int) -> bool:
        """Whether the token may be a picture's, which are all shown alike."""
        return self.config.pictures is not None and token == self.config.pictures.placeholder

    @property
    def _pools_more_than_the_last(self) -> bool:
        return self.params.pooling is not None and self.params.pooling.kind is not PoolingKind.LAST

    @property
    def _is_stopped(self) -> bool:
        return bool(self.received) and self.received[-1] in self.params.stop_token_ids

    @property
    def _is_full(self) -> bool:
        return len(self.received) == self.params.max_tokens

    def _check_finish(self, update: Update) -> None:
        stopped, full = bool(update.token_ids) and self._is_stopped, self._is_full
        self.finish = update.finish
        allowed = {
            None: bool(update.token_ids or update.restarted) and not stopped and not full,
            FinishReason.STOP: bool(update.vector) or (stopped and update.matched_stop == self.received[-1]),
            FinishReason.LENGTH: full and not stopped,
            FinishReason.ABORT: self.may_abort and not update.token_ids,
            FinishReason.ERROR: not update.token_ids and self._may_end_with(update.failure),
        }
        if not allowed[update.finish]:
            raise Violation(f"request {self.id} ended with {update} after {self.received}")
        if (update.failure is None) != (update.finish is not FinishReason.ERROR):
            raise Violation(f"a failure too many: {update}")

    def _may_end_with(self, failure: Failure | None) -> bool:
        return failure is not None and {
            "EngineError": self.may_fail,
            "Unavailable": self.may_stop,  # it was told to stop what it was at
            "NumericalError": len(self.received) == self.breaks_at,
            "Conflict": self.may_lose_adapter and failure.code == "adapter_lost",
            "RequestTimeout": True,  # `Liveness` knows whose time is up
        }.get(failure.kind, False)


class Oracles:
    """Every request's history, and the state of the scheduler after each call."""

    make_liveness: ClassVar[type[Liveness]] = Liveness

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler, runner: HashRunner) -> None:
        self.config, self.scheduler, self.runner = config, scheduler, runner
        self.live: dict[int, Tracked] = {}
        self.liveness = self.make_liveness(config, scheduler)
        self.log = hashlib.sha256()
        self.num_hits = self.num_finished = self.num_tokens = 0
        self.longest_retraction = 0
        self._checks = 0
        self.caches_are_there = True  # on the device
        self.num_damaged = 0  # times that the simulation damaged the ledgers on purpose

    def salt(self, namespace: str) -> int:
        """Return what the hash model makes of a namespace of `namespace_of`."""
        return salt_of(namespace)

    def rows_of_ids(self, tokens: I32, salt: int, delta: int) -> Rows:
        """The rows of encodings in an edge of the tree that has these ids, by their places in it. Its first token is
        rotated by `delta` more than by its position unless it is a picture's."""
        return NO_ROWS

    def added(self, req: Request, now: float, rows: Rows = NO_ROWS) -> Tracked:
        salt = self.salt(namespace_of(req))
        tracked = self.live[req.id] = Tracked(req, self.runner.model, self.config, now, salt, rows)
        self.liveness.added(req, now)
        return tracked

    def heard(self, updates: list[Update], now: float) -> list[Tracked]:
        """Take in updates; returns the requests that ended."""
        ended = []
        for update in updates:
            tracked = self.live.get(update.request_id)
            if tracked is None:
                raise Violation(f"news of request {update.request_id}, which does not exist: {update}")
            tracked.take(update, now, self.runner.cached.get(tracked.id))
            self.num_tokens += len(update.token_ids)
            if update.cache and update.cache.cached_tokens:
                self.num_hits += 1
            if update.finish:
                ended.append(self.live.pop(tracked.id))
                self.runner.cached.pop(tracked.id, None)
                self.num_finished += 1
            self.log.update(logged(update).encode())
        self.liveness.heard(updates, now)
        return ended

    def check(self) -> None:
        """The pools, the queues and the cache agree with each other and with the clients."""
        scheduler = self.scheduler
        scheduler.audit()
        require(
            scheduler.counters.get("books_cleared", 0) == self.num_damaged,
            "the books were wrong when a step failed: the engine survives that by emptying its cache, and hides it",
        )
        of_clients = {id for id, req in scheduler.requests.items() if not req.is_check}
        require(of_clients == self.live.keys(), "the scheduler lost a request, or kept one too long")
        waiting = scheduler.queues.waiting
        by_status = dict.fromkeys(Status, 0)
        for req in scheduler.requests.values():
            by_status[req.status] += 1
        require(
            (len(waiting), len(scheduler.queues.extending), len(scheduler.queues.running))
            == (by_status[Status.WAITING], by_status[Status.EXTENDING], by_status[Status.DECODING])
            and (len(scheduler.queues.pending), len(scheduler.queues.transferring))
            == (by_status[Status.PENDING], by_status[Status.TRANSFERRING]),
            "a request stands in another queue than its status says",
        )
        require(
            scheduler.queues.num_waiting_tokens == sum(len(req.tokens) for req in waiting),
            "the number of waiting tokens is not their sum",
        )
        room = self.config.kinds.retraction_host_bytes
        require(
            0 <= scheduler.memory.host_copies.num_bytes <= room,
            f"{scheduler.memory.host_copies.num_bytes} bytes on the host, of {room}",
        )
        self._check_promises()
        self._checks += 1
        if self._checks % 16 == 0 and self.caches_are_there:
            self.check_cache()

    def _check_promises(self) -> None:
        """Admission promised no more of any kind than there is, and requests took no more than was promised."""
        pools = self.scheduler.pools
        for kind in pools.kinds:
            left = pools.num_unpromised(kind)
            in_use = pools.rows.available_size() < pools.rows.slots.capacity
            require(
                left >= 0 or not in_use, f"{kind.name}: rows in use were promised {-left} slots more than there are"
            )
            excess = left - kind.num_available
            require(kind.name != WINDOW or excess <= 0, f"{kind.name}: rows took {excess} slots more than promised")

    def check_cache(self) -> None:
        """Every cached page, window and state holds what exactly the tokens that the tree says leave, in their
        namespace."""
        for namespace, root in self.scheduler.pools.cache.index.roots.items():
            salt = self.salt(namespace)
            self._check_below(root, 0, salt, 0, salt, 0)
        self.runner.cache_tiers.check(self.scheduler, self.salt, self.rows_of_ids)

    def _check_below(self, node: Node, start: int, chain: int, state: int, salt: int, delta: int) -> None:
        for child in node.children.values():
            tokens = np.frombuffer(child.key, dtype=np.int32)
            rows = self.rows_of_ids(tokens, salt, delta)
            right = chain_of(keys_of(tokens, rows), start, chain)
            end = start + len(tokens)
            self._check_pages(child, right)
            keys = state_keys_of(tokens, rows)
            after = int(states_after(keys, state, salt)[-1]) if self.runner.states else 0
            states = states_of(self.scheduler.pools)
            if states and (slot := states.in_tree.slot_of(child)):
                self._check_state(slot, after, end)
            self._check_below(child, end, int(right[-1]), after, salt, rows.delta)

    def _check_pages(self, node: Node, right: U64) -> None:
        runner, pages = self.runner, right.reshape(len(node.pages), -1)
        if runner.model.full and not np.array_equal(pages, runner.pages.by_slot[node.pages]):
            raise Violation(f"cached pages {node.pages} do not hold the KV of their tokens")
        if runner.windows is None:
            return
        held = runner.pools.windows
        assert held is not None, "the model has windows"
        windows = held.map.full_to_window[node.pages]
        there = (windows != PAD) & (held.map.begins[node.pages] == 0)
        if not np.array_equal(windowed(pages[there]), runner.windows.bytes.by_slot[windows[there]]):
            raise Violation(f"cached windows {windows} of pages {node.pages} do not hold the KV of their tokens")

    def _check_state(self, slot: int, right: int, length: int) -> None:
        states = self.runner.states
        assert states is not None, "the model has states"
        if (int(states.states[slot]), int(states.lens[slot])) != (right, length):
            raise Violation(
                f"cached state {slot} is not that of its {length} tokens; it has read {int(states.lens[slot])}"
            )

    def check_drained(self) -> None:
        """Nothing is left: all clients have their answer, and whatever is not cached is free."""
        require(not self.live, f"requests {sorted(self.live)} never ended")
        pools, config = self.scheduler.pools, self.config
        self.check()
        if self.caches_are_there:  # else it sleeps, and what it kept is on the host
            self.check_cache()
        require(pools.rows.available_size() == pools.rows.slots.capacity, "a row is not free although nobody runs")
        require(pools.kv.num_free + pools.cache.num_pages == config.num_pages, "a page is neither free nor cached")
        require(pools.cache.num_evictable == pools.cache.num_pages, "a page is pinned although nobody runs")
        if states_of(pools):
            cached = states_of(pools)
            require(
                states_of(pools).pool.num_free + cached.num_cached == num_states(config.kinds), "a state slot is lost"
            )
            require(cached.num_locked == 0, "a state is locked although nobody runs")
        if windows_of(pools):
            pool = windows_of(pools)
            require(pool.slots.num_free + pool.num_cached == num_window_pages(config.kinds), "a window page is lost")
            require(pool.num_locked == 0 and not pool.map.locks.any(), "a window is locked although nobody runs")
        require(self.runner.host.copies.keys() <= set(pools.draft.drops), "the host keeps what nobody will come for")
        require(self.scheduler.memory.host_copies.num_bytes == 0, "host memory is booked although nobody is retracted")


def reference_output(prompt: list[int], count: int, *, vocab: int, seed: int = 0, namespace: str = "") -> list[int]:
    generated = HashModel(vocab=vocab).generate(prompt, salt=salt_of(f"0/{namespace}"), seed=seed)
    return [g.token_id for g in islice(generated, count)]
