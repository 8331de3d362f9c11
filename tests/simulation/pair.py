"""Two real schedulers, one for prompts and one for decoding, with a wire between them, under random traffic and faults.

python -m tests.simulation.pair --seed 1234              replay one seed
python -m tests.simulation.pair --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np

from forebay.base.errors import Overloaded, Unavailable
from forebay.config.engine_config import (
    DisaggregationMode,
    DisaggregationOptions,
    SchedulerConfig,
    SpeculativeAlgorithm,
    StateStrategy,
)
from forebay.memory.adapters import ADAPTER
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.cached_windows import WINDOW
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import FREE, Slots
from forebay.requests.pictures import Picture
from forebay.requests.request import Request
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.transfers import Closed, Event, Offer, Rendezvous, Tail, Ticket
from forebay.requests.updates import Failure, Update
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import Role
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.proposer import Proposer
from tests.kinds_of import num_states, num_window_pages, resized, window_of
from tests.simulation.causes import Causes
from tests.simulation.command_line import command_line
from tests.simulation.hashing import NO_ROWS, Rows
from tests.simulation.liveness import require
from tests.simulation.oracles import Oracles, Tracked, namespace_of
from tests.simulation.pair_liveness import TICKS, TICKS_PER_TOKEN, PairLiveness, Rooms
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import Simulation, scaled_down
from tests.simulation.wire import Wire, WireFaults
from tests.simulation.workload import (
    PROPOSED_ON,
    Conversations,
    Faults,
    Traffic,
    random_config,
    random_traffic,
    spare_slots,
    speculating,
)

BOOTSTRAP_S: Final = 1.0
LEASE_S: Final = 2.0
HOST, PORT = "prefill", 8998
_NO_REQUEST: Final = 1 << 40


@dataclass(frozen=True, kw_only=True)
class PairOutcome:
    """What a run did, with both halves."""

    seeds: int = 1
    pairs: int = 0
    whole: int = 0  # of which all was well from the first token to the last
    arrived: int = 0
    late: int = 0  # writes behind a request's end
    hurt: int = 0
    pooled: int = 0
    checks: int = 0
    retractions: int = 0
    accepted: int = 0
    steps: int = 0
    digest: str = "0" * 64

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        return type(self)(**sums, digest=f"{int(self.digest, 16) ^ int(other.digest, 16):064x}")


class HalfTracked(Tracked):
    """A request with another half. `Causes` decides which typed errors it may end with."""

    on_decode = False
    causes: Causes

    def _check_first(self, update: Update, cached: int | None) -> None:
        if not (self.on_decode and self.room):
            super()._check_first(update, cached)
            return
        require(update.cache is not None, f"request {self.id}: its first token came without a cache report")
        self.report = update.cache
        if self.params.prompt_logprobs >= 0:
            self._check_prompt_logprobs(update)

    def _may_end_with(self, failure: Failure | None) -> bool:
        if failure is None:
            return False
        own = failure.kind == "NumericalError" or failure.code in ("aborted", "step_failed", "adapter_lost")
        return (own and super()._may_end_with(failure)) or self.causes.explain(self.id, failure)


class HalfOracles(Oracles):
    """With `strict` no limit of time is ever reached."""

    make_liveness: ClassVar[type[PairLiveness]] = PairLiveness
    liveness: PairLiveness
    causes: Causes
    strict = False

    def added(self, req: Request, now: float, rows: Rows = NO_ROWS) -> Tracked:
        tracked = HalfTracked(req, self.runner.model, self.config, now, self.salt(namespace_of(req)), rows)
        tracked.causes, tracked.on_decode = self.causes, self.config.disaggregation.is_decode
        self.live[req.id] = tracked
        self.liveness.added(req, now)
        return tracked

    def check(self) -> None:
        super().check()
        scheduler, most = self.scheduler, self.config.max_running_requests
        require(scheduler.queues.num_running <= most, f"{scheduler.queues.num_running} requests run; {most} may")


class Half(Simulation):
    """One of the two engines. Its `Pair` sets the `wire` between them."""

    make_oracles: ClassVar[type[HalfOracles]] = HalfOracles
    oracles: HalfOracles
    wire: Wire

    def __init__(
        self,
        config: SchedulerConfig,
        traffic: Traffic,
        rng: Random,
        role: Role,
        *,
        every: int = 0,
        skips: bool = False,
        **others: Any,
    ) -> None:
        def make_scheduler(asked: SchedulerConfig, proposer: Proposer | None) -> RetractingScheduler:
            return RetractingScheduler(asked, proposer, role, every=every, skips=skips)

        super().__init__(config, traffic, rng, make_scheduler=make_scheduler, **others)
        self.role, self.page_size = role, config.page_size
        self.oracles.causes = self.causes = Causes(config, self.scheduler, lambda: self.now)
        self.rooms: dict[int, int] = {}  # the latest request of each
        self.hurt: Callable[[int], None] = lambda room: None
        self.asides: list[Ticket] = []  # of checks of the transfers: places that are nobody's meanwhile

    def set_aside(self, ticket: Ticket, num_tokens: int) -> bool:
        try:
            self.role.spare.set_aside(ticket, num_tokens)
        except Unavailable:
            return False
        self.asides.append(ticket)
        return True

    # -- what the wire asks ----------------------------------------------------------------------------------------

    def of_room(self, room: int) -> int:
        return self.rooms[room]

    def slots(self, kind: str) -> Slots:
        pools = self.scheduler.pools
        return {KV: pools.kv, **{each.name: each.slots for each in pools.kinds}}[kind]

    def words(self, kind: str) -> list[np.ndarray]:
        """Return what is kept of a kind, by location or, where slots have no pages, by slot."""
        windows, states = self.runner.windows, self.runner.states
        if kind == KV:
            return [self.runner.kv]
        if kind == WINDOW:
            assert windows is not None, "the model has windows"
            return [windows.bytes.words]
        assert states is not None, "the model has states"
        return [states.states, states.lens]

    def take(self, event: Event) -> None:
        self.oracles.liveness.takes(event, self.now)
        ended = self.causes.hears(event)
        self.scheduler.handoff.take(event, self.now)
        self._heard(self.core._take_updates())
        self.causes.taken(ended, event)
        self._send_orders()

    def arrived(self, room: int, tail: Tail) -> None:
        self.runner.arrived[self.rooms[room]] = tail.num_tokens

    def _send_orders(self) -> None:
        for order in self.scheduler.handoff.tickets.take_orders():
            self.causes.ordered(order)
            if isinstance(order, Offer):
                self.oracles.liveness.offered(order, self.rooms[order.ticket.room], self.now)
            self.wire.submit(self, order)
        self.causes.all_told()

    # -- requests --------------------------------------------------------------------------------------------------

    def meet(
        self, prompt: Sequence[int], params: SamplingParams, namespace: str, priority: int, where: Rendezvous | None
    ) -> Tracked | None:
        """One half of a request arrives, or a whole one; None where it is refused."""
        self.num_added += 1
        number = self.num_added
        req = Request(
            number,
            prompt,
            params,
            priority=priority,
            namespace=namespace,
            arrival=self.now,
            rendezvous=where,
            adapter=self._adapter(),
        )
        req.compute_with(self.scheduler.queues.weight_version)
        self.salts[number] = salt = self.oracles.salt(namespace_of(req))
        pictures = self._pictures(prompt)
        rows = self._rows(pictures)
        self.references.add(number, prompt, params, salt=salt, rows=rows)
        room = where.room if where else 0
        why = self._why_refused(req, room)
        refused = self._submit(req, pictures)
        why = why or self._no_room_for(req, pictures)
        code = refused.code if refused else ""
        require(code == why, f"{req} was refused with {refused}, not {why or 'admitted'}")
        if refused:
            self._send_orders()
            self.num_refused += 1
            return None
        self.rooms[room] = number
        added = self.scheduler.added
        assert added is not None, f"{req} was admitted"
        tracked = self.oracles.added(added, self.now, rows)
        self.causes.added(added, prompt)
        self._heard(self.core._take_updates())  # what came before it may have ended it
        self._send_orders()
        return tracked

    def _pictures(self, prompt: Sequence[int]) -> Sequence[Picture]:
        """Return the pictures of a prompt."""
        return ()

    def _why_refused(self, req: Request, room: int) -> str:
        """The code of the error with which the engine must refuse this request; empty if it must admit it."""
        config, scheduler = self.config, self.scheduler
        if room and not scheduler.queues.admits:
            return "peer_asleep"
        if room and any(live.room == room for live in self.oracles.live.values()):
            return "room_in_use"
        num_new = req.params.num_generated if config.disaggregation.is_decode or not room else 1
        num_tokens, num_kv = req.num_prompt + num_new, req.num_prompt + max(0, num_new - 1)
        if num_tokens > config.context_length:
            return "context_length_exceeded"
        if num_kv > config.num_pages * config.page_size:
            return "kv_capacity_exceeded"
        queued = sum(len(other.tokens) for other in (*scheduler.queues.waiting, *scheduler.queues.pending))
        full = len(self.oracles.live) >= config.max_running_requests + config.max_queued_requests
        full = full or bool(queued and queued + req.num_prompt > config.max_queued_tokens)
        return Overloaded("").code if full else ""

    def _of(self, request_id: int, may: str) -> None:
        super()._of(request_id, may)
        if request_id in self.oracles.live:
            self.hurt(self.oracles.live[request_id].room)

    def abort(self, request_id: int) -> None:
        if request_id in self.oracles.live:
            self.hurt(self.oracles.live[request_id].room)
        super().abort(request_id)

    def _heard(self, updates: list[Update]) -> None:
        rooms = {update.request_id: self._room_of(update.request_id) for update in updates if update.failure}
        super()._heard(updates)
        for update in updates:
            if update.finish:
                self.causes.ended(update)
        for room in rooms.values():
            self.hurt(room)

    def _room_of(self, request_id: int) -> int:
        tracked = self.oracles.live.get(request_id)
        return tracked.room if tracked else 0

    def expire(self, run: Callable[[], None]) -> None:
        super().expire(run)
        self.causes.expires = True
        self._heard(self.core._take_updates())
        self.causes.expires = False

    def recover(self, rng: Random) -> None:
        """Something fails between two steps; sometimes the ledgers are wrong, too."""
        if not self.device.may_fail:
            return
        kv = self.scheduler.pools.kv
        free = np.flatnonzero(kv.owner == FREE)
        if len(free) > 0 and rng.random() < 0.5:
            self.causes.damaged()
            kv.owner[free[0]] = _NO_REQUEST
            self.oracles.num_damaged += 1
            self.oracles.liveness.cleared()
        self.disturb(rng, ["hear"])
        self._send_orders()
        self.causes.cleared = False
        self.oracles.check()

    def pass_time(self, seconds: float) -> None:
        """Do nothing: `Pair` sets the time of both engines, which never decreases."""

    def tick(self) -> bool:
        done = super().tick()
        self._send_orders()
        return done

    @property
    def done(self) -> bool:
        return self.scheduler.idle and not self.scheduler.handoff.tickets.num_open

    def calm(self) -> None:
        """Let no faults happen from here on, and no retraction but those for want of memory."""
        self.faults, self.scheduler.every = Faults(), 0

    def check_drained(self) -> None:
        """Require that all requests have ended, and that no memory is held or deferred."""
        deferred = self.scheduler.pools.deferred.entries
        self.oracles.check_drained()
        require(not deferred, "something is deferred although every fence is open")
        for pool in self.scheduler.state(self.now).pools:
            running = 0 if pool.name == ADAPTER else pool.running  # loaded adapters are among those that run
            require(pool.quarantined == running == 0, f"in quarantine: {pool}")
        if self.proposer:
            self.proposer.check_drained()


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival:
    """A request on its way to one engine. `where` is None if it has no other half."""

    half: Half
    prompt: Sequence[int]
    params: SamplingParams
    namespace: str
    priority: int
    where: Rendezvous | None = None

    def meet(self) -> Tracked | None:
        """Submit it; None if it was refused."""
        return self.half.meet(self.prompt, self.params, self.namespace, self.priority, self.where)


AnyHalf = TypeVar("AnyHalf", bound=Half, covariant=True)


class Pair(Generic[AnyHalf]):
    """Two engines with a wire between them, and all that they are asked for. `beginnings` happen before the first
    request."""

    def __init__(self, prefill: AnyHalf, decode: AnyHalf, rng: Random, traffic: Traffic, faults: WireFaults) -> None:
        self.prefill, self.decode, self.rng, self.traffic = prefill, decode, rng, traffic
        self.hurt: set[int] = set()
        self.wire = Wire(rng, prefill, decode, self.hurt.add)
        self.wire.faults = faults
        capacity = min(
            min(half.config.context_length, half.config.num_pages * half.page_size) for half in (prefill, decode)
        )
        self.conversations = Conversations(rng, traffic, capacity)
        for half in (prefill, decode):
            half.wire, half.hurt = self.wire, self.hurt.add
            half.causes.is_altered = self.wire.altered.__contains__
            half.conversations = self.conversations
            half.oracles.strict = half.config.disaggregation.lease_s > LEASE_S
        self.living = Rooms(self._ticks_of_timeouts())
        self.beginnings: list[Callable[[], None]] = []
        self.coming: list[Arrival] = []
        self.prompts: dict[int, list[list[int]]] = {}  # of each room
        self.num_pairs = self.num_whole = self.num_pooled = self.num_checks = 0
        # What has no other half, and how likely it is.
        self.others, self.pooled, self.checks, self.alone = Random(0), 0.0, 0.0, 0.05
        self.recovers = 0.0
        self.now = 0.0

    def arrive(self) -> None:
        """The halves of a request, in any order; one of them may get lost."""
        rng, params = self.rng, self.conversations.params()
        prompt = self.conversations.prompt(params.max_tokens)
        room = self._room(prompt)
        namespace, priority = rng.choice(self.traffic.namespaces), rng.randrange(3)
        nonce = rng.getrandbits(128).to_bytes(16, "little")
        where = Rendezvous(HOST, PORT, room)
        whole = Arrival(half=self.decode, prompt=prompt, params=params, namespace=namespace, priority=priority)
        halves = [
            replace(whole, half=self.prefill, where=where),
            replace(whole, where=replace_nonce(where, nonce)),
        ]
        if self.others.random() < self.pooled:
            half = self.others.choice([self.prefill, self.decode])
            vector = SamplingParams.of_pooling(Pooling(self.others.choice(list(PoolingKind)[:3])))
            self.coming.append(replace(whole, half=half, params=vector))
            self.num_pooled += 1
        if rng.random() < self.alone:
            self.coming.append(whole)
            return
        if self.wire.faults.death and rng.random() < 0.05:
            self.hurt.add(room)
            del halves[rng.randrange(2)]
        self.num_pairs += 1
        self.coming += halves

    def _meet(self, arrival: Arrival) -> None:
        """If one half is refused, its client gives up the other one."""
        tracked, where = arrival.meet(), arrival.where
        if where is None:
            return
        if tracked is not None:
            self.living.begin(where.room, len(arrival.prompt) + tracked.params.max_tokens)
            return
        self.hurt.add(where.room)
        self.give_up(self.prefill if arrival.half is self.decode else self.decode, where.room)

    def give_up(self, half: Half, room: int) -> None:
        """Take back the half of a request that is on its way to an engine, or abort it there."""
        halves = [come for come in self.coming if come.half is half and come.where and come.where.room == room]
        if halves:
            self.coming.remove(halves[-1])
        elif room in half.rooms:
            half.abort(half.rooms[room])

    def _room(self, prompt: Sequence[int]) -> int:
        """Now and then one that is in use, or was, with another prompt: a label may come twice."""
        used = sorted(room for room, prompts in self.prompts.items() if list(prompt) not in prompts)
        room = self.rng.getrandbits(62) + 1
        if used and not self.prefill.oracles.strict and self.rng.random() < 0.1:
            room = self.rng.choice(used)
            self.hurt.add(room)
        self.prompts.setdefault(room, []).append(list(prompt))
        return room

    def tick(self) -> None:
        rng = self.rng
        self.now += rng.random() * 2 * self.traffic.tick_s
        self.prefill.now = self.decode.now = self.now
        while self.coming and rng.random() < 0.7:
            self._meet(self.coming.pop(rng.randrange(len(self.coming))))
        for half in rng.sample([self.prefill, self.decode], 2):
            if rng.random() < 0.9:
                half.tick()
            self.wire.tick()
            self._check(half)
        self.living.tick(self._living_rooms(), counts=self._gets_on)

    @property
    def _gets_on(self) -> bool:
        """Whether both engines are awake."""
        return self.prefill.scheduler.queues.admits and self.decode.scheduler.queues.admits

    def _living_rooms(self) -> set[int]:
        """Rooms of which either engine has a request."""
        halves = (self.prefill, self.decode)
        return {live.room for half in halves for live in half.oracles.live.values() if live.room}

    def _check(self, half: Half) -> None:
        rng = self.others
        if rng.random() < self.recovers:
            half.recover(rng)
        if rng.random() < self.checks:
            ticket = Ticket("check", 0, rng.getrandbits(128).to_bytes(16, "little"))
            self.num_checks += half.set_aside(ticket, rng.randint(1, 40))
        if half.asides and rng.random() < 0.2:
            half.take(Closed(half.asides.pop(rng.randrange(len(half.asides)))))

    def run(self) -> PairOutcome:
        rng, traffic = self.rng, self.traffic
        for begin in self.beginnings:
            begin()
        while self.num_pairs < traffic.num_requests:
            if rng.random() < traffic.arrivals:
                self.arrive()
            self.tick()
        self.drain()
        counters = self.decode.scheduler.counters
        return PairOutcome(
            pairs=self.num_pairs,
            whole=self.num_pairs - len(self.hurt),
            hurt=len(self.hurt),
            pooled=self.num_pooled,
            checks=self.num_checks,
            arrived=self.wire.num_arrived,
            late=self.wire.num_late,
            retractions=int(counters["retractions"]),
            accepted=int(counters["accepted_tokens"]),
            steps=self.prefill.num_steps + self.decode.num_steps,
            digest=hashlib.sha256(self.prefill.oracles.log.digest() + self.decode.oracles.log.digest()).hexdigest(),
        )

    def drain(self) -> None:
        """Faults and arrivals have stopped: both sides must come to rest, with nothing left anywhere."""
        self.wire.faults, self.checks, self.recovers = WireFaults(), 0.0, 0.0
        for half in (self.prefill, self.decode):
            half.calm()
        limit = self._limit()
        for _ in range(limit):
            if not self.coming and self.prefill.done and self.decode.done and not self.wire.links:
                break
            self.tick()
        for half in (self.prefill, self.decode):
            deferred = half.scheduler.pools.deferred.entries
            left = list(half.scheduler.requests.values()), half.scheduler.handoff.tickets.num_open, deferred
            require(half.done, f"not drained after {limit} ticks: {left}")
            half.check_drained()

    def _limit(self) -> int:
        tokens = sum(len(live.tokens) + live.params.max_tokens for live in self.decode.oracles.live.values())
        return TICKS + TICKS_PER_TOKEN * (tokens + len(self.coming)) + self._ticks_of_timeouts()

    def _ticks_of_timeouts(self) -> int:
        if self.prefill.oracles.strict:
            return 0
        time = LEASE_S + BOOTSTRAP_S + self.prefill.config.stall_timeout_s
        return int(4 * time / self.traffic.tick_s)


def replace_nonce(where: Rendezvous, nonce: bytes) -> Rendezvous:
    return Rendezvous(where.host, where.port, where.room, nonce)


# -- configurations -------------------------------------------------------------------------------------------------


Made = TypeVar("Made", bound=Pair[Half])
OneHalf = TypeVar("OneHalf", bound=Half)


def random_pair(seed: int, restricted: float = 0.0) -> Pair[Half]:
    """Return the two engines of a seed."""
    return random_pair_of(seed, Pair[Half], Half, restricted)


def random_pair_of(
    seed: int,
    make_pair: Callable[[OneHalf, OneHalf, Random, Traffic, WireFaults], Made],
    half: type[OneHalf],
    restricted: float = 0.0,
) -> Made:
    """Return the two engines of a seed, of the class `half`, in a pair that `make_pair` makes."""
    rng, widths = Random(f"{seed} pair"), Random(f"{seed} widths")
    base = random_config(rng)
    traffic = replace(random_traffic(rng, base), tick_s=0.02, num_requests=rng.randint(8, 24))
    traffic = replace(traffic, restricted=restricted)
    calm = rng.random() < 0.3
    hurried = not calm and rng.random() < 0.15
    queued_s, stalled_s, whole_s = (1.0, 0.5, 3.0) if hurried else (20.0, 5.0, 60.0) if not calm else (1e3, 1e3, 1e3)
    base = replace(base, queue_timeout_s=queued_s, stall_timeout_s=stalled_s, request_timeout_s=whole_s)
    traffic = replace(traffic, faults=Faults() if calm else replace(traffic.faults, between_steps=0.0))
    wire = WireFaults(late=rng.choice([0.0, 0.3, 0.8]))
    if not calm:
        lost, altered = rng.choice([0.0, 0.02]), rng.choice([0.0, 0.02])
        wire = replace(wire, lost=lost, altered=altered, doubled=0.1, death=rng.choice([0.0, 0.002]))
    prefill = sized(rng, base, DisaggregationMode.PREFILL, patient=calm)
    decode = _speculating(widths, sized(rng, base, DisaggregationMode.DECODE, patient=calm))
    every, skips = rng.choice([0, 0, 0, 4, 10]), rng.random() < 0.5
    role = DecodeRole(decode.disaggregation, "decode")
    made = make_pair(
        half(prefill, traffic, rng, PrefillRole(prefill.disaggregation)),
        half(decode, traffic, rng, role, every=every, skips=skips, widths=widths),
        rng,
        traffic,
        wire,
    )
    made.others = Random(f"{seed} others")
    made.pooled, made.checks = made.others.choice([0.0, 0.0, 0.4]), made.others.choice([0.0, 0.0, 0.05])
    made.alone = made.others.choice([0.05, 0.05, 0.5])
    made.recovers = 0.0 if calm else made.others.choice([0.0, 0.01, 0.05])
    return made


def sized(rng: Random, base: SchedulerConfig, mode: DisaggregationMode, *, patient: bool) -> SchedulerConfig:
    """The same layers in pools of its own; pages may differ in size where one divides the other."""
    decodes = mode is DisaggregationMode.DECODE
    factor = rng.choice([1, 1, 1, 2])
    if num_states(base.kinds) and base.page_size == 1:
        factor = 1
    page_size = base.page_size * factor
    extra = rng.choice([0, 2, 2 * base.max_running_requests]) if decodes else 0
    radix_cache = rng.random() < (0.3 if decodes else 0.8)
    kinds, rows = base.kinds, base.max_running_requests + extra
    strategy = kinds.strategy if page_size == 1 else StateStrategy.EXTRA_BUFFER
    if decodes and not radix_cache:
        strategy = StateStrategy.NO_BUFFER
    kinds = replace(kinds, strategy=strategy, track_interval=kinds.track_interval * factor)
    if num_states(kinds):
        tracks = strategy is StateStrategy.EXTRA_BUFFER and radix_cache
        per_request = 1 + tracking_slots(tracks, base.overlap_depth)
        kinds = resized(kinds, num_slots=rows * per_request + spare_slots(rng, 0, 1, 4))
    if num_window_pages(kinds):
        tracked = kinds.track_interval if num_states(kinds) else 0
        pages = rows * window_pages_per_request(window_of(kinds), page_size, base.overlap_depth, tracked)
        pages += window_pages_in_flight(base.chunked_prefill_size, page_size, base.overlap_depth)
        kinds = resized(kinds, num_window_pages=pages + spare_slots(rng, 0, 2, 16))
    options = DisaggregationOptions(
        mode=mode,
        bootstrap_timeout_s=1e3 if patient else BOOTSTRAP_S,
        lease_s=1e3 if patient else LEASE_S,
        decode_extra_slots=extra,
        num_reserved_decode_tokens=rng.choice([0, 4, 512]),
    )
    num_pages = max(2, base.num_pages // factor, -(-base.context_length // page_size) if rng.random() < 0.5 else 0)
    return replace(
        base, page_size=page_size, num_pages=num_pages, radix_cache=radix_cache, kinds=kinds, disaggregation=options
    )


def _speculating(rng: Random, config: SchedulerConfig) -> SchedulerConfig:
    algorithm = rng.choice([SpeculativeAlgorithm.OFF, SpeculativeAlgorithm.OFF, *PROPOSED_ON])
    if algorithm is SpeculativeAlgorithm.OFF:
        return config
    rows = config.max_running_requests + config.disaggregation.decode_extra_slots
    width = rng.randint(2, 5)
    wide = speculating(replace(config, max_running_requests=rows), algorithm, width)
    return replace(wide, max_running_requests=config.max_running_requests)


def run_pair(seed: int, restricted: float = 0.0) -> PairOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    pair = None
    try:
        with scaled_down():
            pair = random_pair(seed, restricted=restricted)
            return pair.run()
    except Exception as error:
        if pair:
            error.add_note(f"{pair.prefill.config}\n{pair.decode.config}")
        error.add_note(f"replay: python -m tests.simulation.pair --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.pair", __doc__ or "", run_pair, PairOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
