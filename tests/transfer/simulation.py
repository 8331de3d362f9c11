"""Transfers of prefill and decode instances under random faults, in virtual time, one seed at a time (C22).

python -m tests.transfer.simulation --seed 12               replay one seed
python -m tests.transfer.simulation --seeds 0:1000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from random import Random
from typing import Final, Self

import numpy as np

from forebay.base.errors import EngineError
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Event,
    Offer,
    Offered,
    Renewed,
    Rest,
    Send,
    Sent,
    Span,
    Tail,
    Ticket,
    Withdraw,
)
from forebay.requests.updates import Failure
from forebay.transfer.session.connection import LocalEngine
from forebay.transfer.session.decode import DecodeStage
from forebay.transfer.wire import frames
from forebay.transfer.wire.frames import PROTOCOL, Layout
from forebay.transfer.worker import Worker
from tests.simulation.command_line import command_line
from tests.simulation.liveness import require
from tests.transfer.virtual import Connection, Memory, Net, OneSided, Process, replaced

HOST, PORT = "prefill", 8998
BOOTSTRAP_S, LEASE_S, BEAT_S = 3.0, 4.0, 0.4
SILENCE_S: Final = 3 * BEAT_S
STALL_S: Final = 2 * SILENCE_S  # the longest: what was on its way before is read behind it
TICK_S: Final = 0.02
REST_S: Final = 4 * (BOOTSTRAP_S + LEASE_S + SILENCE_S)  # within which everything ends once faults have stopped
CANARY: Final = 0xEE
ABORTED: Final = Failure.of(EngineError("the request was aborted by its client", code="aborted"))


def shapes(page_size: int, num_pages: int) -> dict[str, KindShape]:
    return {
        "kv": KindShape(by_token=True, page_size=page_size, num_ids=num_pages + 1, bytes_per_place=(8, 4)),
        "state": KindShape(by_token=False, page_size=1, num_ids=17, bytes_per_place=(16,)),
    }


def content(seed: int, kind: str, region: int, position: int, size: int) -> np.ndarray:
    """What layers keep at one position of the prompt that has this seed."""
    value = hash((seed, kind == "kv", region, position)) & (1 << 62) - 1
    return np.frombuffer(np.array([value, value * 31 & (1 << 62) - 1]).tobytes(), dtype=np.uint8)[:size]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Chances per tick of what goes wrong, and of how the traffic is."""

    offers: float = 0.15
    withdraws: float = 0.0
    cuts: float = 0.0
    kills: float = 0.0
    hangs: float = 0.0  # an engine takes no news for a while
    stalls: float = 0.0  # a worker does nothing for a while
    rests: float = 0.0
    alters: float = 0.0  # per chunk
    slows: float = 0.0  # per chunk of a one-sided writer
    strangers: float = 0.0
    declines: float = 0.0


@dataclass(slots=True)
class Part:
    """One side's view of a ticket. `lost` explains an end without data: code by code."""

    ticket: Ticket
    seed: int
    spans: dict[str, Span]
    num_tokens: int
    since: float
    events: list[str] = field(default_factory=list)
    withdrawn: bool = False
    code: str = ""  # of the failure with which it broke
    sent: int = -1  # tokens that prefill sent; -1 before the first
    tail: bool = False

    @property
    def is_over(self) -> bool:
        return self.events[-1:] == ["Closed"]


class Engine:
    """What an engine does with its worker, and the oracle of what the worker tells it."""

    def __init__(self, world: World, instance: str, mode: DisaggregationMode, page_size: int, transport: str) -> None:
        self.world, self.rng, self.page_size = world, world.rng, page_size
        self.is_decode = mode is DisaggregationMode.DECODE
        self.shapes = shapes(page_size, 48 // page_size)
        self.memory, self.process = Memory(self.shapes), Process()
        world.net.process = self.process
        self.free = {kind: list(range(1, shape.num_ids)) for kind, shape in self.shapes.items()}
        for kind in self.shapes:
            self._spoil(kind, self.free[kind])
        self.worker = Worker(
            LocalEngine(
                options=DisaggregationOptions(
                    mode=mode,
                    host=HOST,
                    bootstrap_port=PORT,
                    cluster_key=b"k" * 32,
                    bootstrap_timeout_s=BOOTSTRAP_S,
                    lease_s=LEASE_S,
                    heartbeat_s=BEAT_S,
                ),
                instance=instance,
                layout=world.layout(page_size),
                shapes=self.shapes,
                memory=self.memory,
                transports=[transport],
                one_sided={"shm": OneSided(world.net, self.memory, self.process)},
                machine="here",
            )
        )
        loop = self.worker._loop
        self.emit, loop.emit = loop.emit, self._emit
        self.parts: dict[bytes, Part] = {}
        self.silent_until = self.deaf_until = self.tick_at = 0.0
        self.untaken_since: float | None = None  # the oldest event that the engine has not taken
        self.heard_at: dict[bytes, float] = {}  # when the worker heard of each ticket, which its engine may not yet
        self.rests = False

    def _emit(self, event: Event) -> None:
        if isinstance(event, Renewed):
            self.world.renewed(event)
        if self.untaken_since is None:
            self.untaken_since = self.world.net.now
        self.heard_at.setdefault(event.ticket.nonce, self.world.net.now)
        self.emit(event)

    # -- turning -------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        now, worker = self.world.net.now, self.worker
        if now < self.silent_until or not self.process.alive:
            return
        for work in self.rng.sample([worker._data_thread._turn, lambda: worker._loop.turn(0.0)], 2):
            if self.rng.random() < 0.8:
                work()
        if now >= self.tick_at:
            self.tick_at = now + worker._period_s
            worker._stage.tick()
        if now >= self.deaf_until and self.rng.random() < 0.6:
            self.untaken_since = None
            for event in worker.poll():
                self.take(event)

    @property
    def sessions(self) -> set[int]:
        """The mover's names for the sessions that there are."""
        side = self.worker._stage
        if isinstance(side, DecodeStage):
            return {peer.session.epoch for peer in side._peers.values() if peer.session}
        return {session.number for session in side._sessions.values()}

    # -- places --------------------------------------------------------------------------------------------------------

    def _take(self, kind: str, number: int) -> np.ndarray | None:
        free = self.free[kind]
        if len(free) < number:
            return None
        ids = [free.pop(self.rng.randrange(len(free))) for _ in range(number)]
        self.check_canary(kind, ids)
        return np.array(ids, dtype=np.int64)

    def take_places(self, num_tokens: int) -> dict[str, Span] | None:
        pages = self._take("kv", -(-num_tokens // self.page_size))
        if pages is None:
            return None
        states = self._take("state", 1)
        if states is None:
            self.free["kv"] += pages.tolist()
            return None
        return {"kv": Span(start=0, ids=pages), "state": Span(start=0, ids=states)}

    def give_back(self, part: Part) -> None:
        for kind, span in part.spans.items():
            self._spoil(kind, span.ids.tolist())
            self.free[kind] += span.ids.tolist()

    def _rows(self, kind: str, ids: Sequence[int]) -> np.ndarray:
        size = self.shapes[kind].page_size
        rows: np.ndarray = (np.array(ids, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()
        return rows

    def _spoil(self, kind: str, ids: Sequence[int]) -> None:
        for raw in self.memory.raw[kind]:
            raw[self._rows(kind, ids)] = CANARY

    def check_canary(self, kind: str, ids: Sequence[int]) -> None:
        """Whatever was closed was written to by nobody since (the fence of C22)."""
        for raw in self.memory.raw[kind]:
            bad = (raw[self._rows(kind, ids)] != CANARY).any()
            require(not bad, f"{kind} {ids} were written to behind the end of their ticket")

    def data(self, part: Part) -> Iterator[tuple[str, int, int, int]]:
        """Each place of a ticket: kind, region, position and row."""
        for kind, span in part.spans.items():
            positions = range(part.num_tokens if kind == "kv" else 1)
            rows = self._rows(kind, span.ids.tolist())
            for region in range(len(self.memory.raw[kind])):
                for position in positions:
                    yield kind, region, position, int(rows[position])

    # -- news ----------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        name, nonce = type(event).__name__, event.ticket.nonce
        if isinstance(event, Offered):
            self.world.offered(self, event)
            return
        part = self.parts.get(nonce)
        require(part is not None, f"{event} of a ticket that nobody has")
        assert part is not None
        require(not part.is_over, f"{name} of {nonce.hex()[:6]} behind its end: {part.events}")
        ends = [kind for kind in part.events if kind in ("Arrived", "Sent", "Broken")]
        if isinstance(event, Closed):
            require(len(ends) == 1, f"closed behind {part.events}")
        elif isinstance(event, Renewed):
            require(self.is_decode and not ends, f"a lease is renewed behind {part.events}")
        else:
            require(not ends, f"{name} behind {part.events}")
        part.events.append(name)
        match event:
            case Broken(_, failure):
                part.code = failure.code
                self.world.explain(self, part, failure)
            case Arrived(_, tail):
                self._arrived(part, tail)
            case Sent():
                require(part.tail, "all has arrived of which not all was sent")
                require(self.world.has(nonce, "Arrived"), "prefill hears of an end that decode did not reach")
            case Closed():
                self.give_back(part)

    def _arrived(self, part: Part, tail: Tail) -> None:
        require(self.is_decode and tail.num_tokens == part.num_tokens, f"{tail} of {part.num_tokens} tokens")
        for kind, region, position, row in self.data(part):
            raw = self.memory.raw[kind][region]
            right = content(part.seed, kind, region, position, raw.shape[1])
            require(bool((raw[row] == right).all()), f"{kind} {position} of region {region} is not what was sent")
        self.world.num_arrived += 1

    # -- prefill -------------------------------------------------------------------------------------------------------

    def send_some(self, part: Part) -> None:
        """The next tokens of the prompt are computed; the state is with the tail."""
        size, before = self.page_size, max(0, part.sent)
        pages = -(-part.num_tokens // size)
        upto = self.rng.randint(before // size, pages)
        part.sent = min(part.num_tokens, upto * size)
        last = upto == pages and self.rng.random() < 0.7
        kv = part.spans["kv"]
        spans = {"kv": Span(start=before // size * size, ids=kv.ids[before // size : upto])}
        if last:
            spans["state"], part.tail = part.spans["state"], True
        for kind, region, position, row in self.data(part):
            if (kind == "kv" and before <= position < part.sent) or (kind == "state" and last):
                raw = self.memory.raw[kind][region]
                raw[row] = content(part.seed, kind, region, position, raw.shape[1])
        tail = Tail(num_tokens=part.num_tokens, token_id=1) if last else None
        self.worker.submit(Send(ticket=part.ticket, spans=spans, tail=tail))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    seeds: int = 1
    offers: int = 0
    arrived: int = 0
    broken: int = 0
    steps: int = 0
    digest: str = "0" * 64

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        return type(self)(**sums, digest=self.digest)


class World:
    """Two decode instances and a prefill instance, whichever processes those are just now."""

    def __init__(self, net: Net, rng: Random, transport: str = "") -> None:
        self.rng, self.net = rng, net
        self.weather = random_weather(rng)
        self.transport = transport or rng.choice(["tcp", "shm"])
        self.sizes = [rng.choice([1, 2, 4]) for _ in range(3)]
        self.numbers, self.prompts = count(1), count(1)
        self.seeds: dict[bytes, int] = {}
        self.events: dict[bytes, set[str]] = {}
        self.faults: list[tuple[float, str]] = []
        self.num_offers = self.num_arrived = self.num_broken = self.num_steps = 0
        self.prefill = self._start(DisaggregationMode.PREFILL, 0)
        self.decodes = [self._start(DisaggregationMode.DECODE, i) for i in (1, 2)]
        self.strangers: list[Connection] = []
        self.declined: dict[bytes, float] = {}
        self.gone: list[Engine] = []

    def layout(self, page_size: int) -> Layout:
        return Layout(
            page_size=page_size,
            vocab_size=100,
            weights="w",
            quantization="none",
            dtype="float32",
            kernels="torch",
            activation_bits=16,
            columns=["kv", "state"],
        )

    def _start(self, mode: DisaggregationMode, place: int) -> Engine:
        return Engine(self, f"{mode.value}-{next(self.numbers)}", mode, self.sizes[place], self.transport)

    @property
    def engines(self) -> list[Engine]:
        return [self.prefill, *self.decodes]

    # -- traffic -------------------------------------------------------------------------------------------------------

    def offer(self, decode: Engine, num_tokens: int = 0) -> None:
        """Offer places for so many tokens; 0: for 1 to 12."""
        num_tokens = num_tokens or self.rng.randint(1, 12)
        nonce, seed = self.rng.randbytes(16), next(self.prompts)
        ticket = Ticket(decode.worker.instance, self.rng.randint(1, 9), nonce)
        self.seeds[nonce] = seed
        if self.rng.random() < self.weather.declines:
            order = Decline(ticket, HOST, PORT, num_tokens, bytes(16), ABORTED)
            decode.worker.submit(order)
            self.declined[nonce] = self.net.now
            return
        spans = decode.take_places(num_tokens)
        if spans is None:
            return
        self.num_offers += 1
        decode.parts[nonce] = Part(ticket, seed, spans, num_tokens, self.net.now)
        decode.worker.submit(
            Offer(ticket=ticket, host=HOST, port=PORT, num_tokens=num_tokens, digest=bytes(16), start=0, spans=spans)
        )

    def offered(self, prefill: Engine, event: Offered) -> None:
        """Prefill hears of an offer, once each."""
        nonce = event.ticket.nonce
        require(prefill is self.prefill and nonce in self.seeds, f"nobody made {event}")
        self.declined.pop(nonce, None)
        if event.declined:
            known = prefill.parts.get(nonce)
            require(known is None, f"{event} is declined behind its offer")
            return
        require(nonce not in prefill.parts, f"{nonce.hex()[:6]} is offered twice")
        spans = prefill.take_places(event.num_tokens)
        if spans is None:
            prefill.worker.submit(Withdraw(event.ticket, ABORTED))
            spans = {kind: Span(start=0, ids=np.empty(0, dtype=np.int64)) for kind in prefill.shapes}
        part = Part(event.ticket, self.seeds[nonce], spans, event.num_tokens, prefill.heard_at[nonce])
        part.withdrawn = not len(spans["kv"].ids)
        prefill.parts[nonce] = part

    def has(self, nonce: bytes, name: str) -> bool:
        return any(name in engine.parts[nonce].events for engine in self._all if nonce in engine.parts) or any(
            type(event).__name__ == name and event.ticket.nonce == nonce
            for engine in self._all
            for event in engine.worker._loop.events.items
        )

    @property
    def _all(self) -> list[Engine]:
        return [*self.engines, *self.gone]

    # -- the oracles ---------------------------------------------------------------------------------------------------

    def explain(self, engine: Engine, part: Part, failure: Failure) -> None:
        """A transfer breaks only through a fault, a limit or an abort of this run."""
        self.num_broken += 1
        nonce, code, start = part.ticket.nonce, failure.code, part.since - STALL_S - SILENCE_S
        seen = {name for at, name in self.faults if at >= start}
        slowed = any(at >= part.since for at in self.net.slowed_at)
        aborted = any(other.parts[nonce].withdrawn for other in self._all if nonce in other.parts)
        causes = {
            "aborted": aborted,
            "peer_lost": bool(seen & {"cut", "kill", "stall", "altered"}) or bool(self.net.num_altered),
            "heartbeat_timeout": bool(seen & {"stall", "kill"}),
            "lease_timeout": slowed or bool(seen & {"stall", "hang", "kill", "cut"}),
            "bootstrap_timeout": bool(seen & {"stall", "kill", "cut"}),
            "checksum_mismatch": self.net.num_altered > 0,
            "peer_asleep": "rest" in seen or self.prefill.rests,
            "invalid_offer": "crowd" in seen,
            "layout_mismatch": "mismatch" in seen,
            "peer_rejected": "bug" in seen,
        }
        require(causes.get(code, False), f"{engine.worker.instance}: {failure} of {part}; there were {seen}")

    def renewed(self, event: Renewed) -> None:
        """The peer that renews a lease has an engine that takes news; a beat may be on its way for a moment."""
        oldest = self.prefill.untaken_since
        if oldest is None:
            return
        stalled = any(name == "stall" and at > self.net.now - 2 * SILENCE_S - 1.0 for at, name in self.faults)
        age = self.net.now - oldest
        require(stalled or age < LEASE_S + 1.0, f"a lease is renewed although prefill takes no news for {age:.1f} s")

    # -- faults --------------------------------------------------------------------------------------------------------

    def _fault(self, name: str) -> None:
        self.faults.append((self.net.now, name))

    def misbehave(self) -> None:
        rng, weather, net = self.rng, self.weather, self.net
        if rng.random() < weather.cuts and net.sockets:
            sock = rng.choice(net.sockets)
            if not sock.is_closed:
                net.cut(sock)
                self._fault("cut")
        if rng.random() < weather.kills:
            self._kill(rng.randrange(3))
        engine = rng.choice(self.engines)
        if rng.random() < weather.hangs:
            engine.deaf_until = net.now + rng.choice([1.0, 2 * LEASE_S + 4.0])
            self._fault("hang")
        if rng.random() < weather.stalls:
            engine.silent_until = net.now + rng.choice([0.5, STALL_S])
            self._fault("stall")
        if rng.random() < weather.rests:
            self.prefill.rests = not self.prefill.rests
            self.prefill.worker.submit(Rest(asleep=self.prefill.rests))
            self._fault("rest")
        if rng.random() < weather.strangers:
            self._stranger()

    def _kill(self, place: int) -> None:
        """A process ends, with its connections, and another one starts in its place."""
        old = self.engines[place]
        old.process.alive = False
        for sock in self.net.sockets:
            if sock.owner is old.process or (
                old.is_decode and any(link.sock is sock for link in old.worker._loop.users)
            ):
                self.net.cut(sock)
        for reader in old.worker._data_thread.receiver.readers.values():
            self.net.cut(reader.sock)
        self.gone.append(old)
        self._fault("kill")
        if place == 0:
            self.prefill = self._start(DisaggregationMode.PREFILL, 0)
        else:
            self.decodes[place - 1] = self._start(DisaggregationMode.DECODE, place)

    def _stranger(self) -> None:
        """A peer with the key that speaks of tickets that are not its own."""
        if not self.strangers or self.strangers[-1].sock.peer.is_closed:
            sock = self.net.connect((HOST, PORT), 1.0)
            link = Connection(sock, "stranger", self.net.clock, None)
            hello = frames.Hello(
                protocol=PROTOCOL, instance=f"stranger-{len(self.strangers)}", epoch=1, nonce=bytes(32)
            )
            self.strangers.append(link)
            link.send(hello)
            link.send(frames.Introduce(layout=self.layout(1), transports=[self.transport], machine="here"))
            return
        link, known = self.strangers[-1], [*self.prefill.parts]
        if not known:
            return
        nonce = self.rng.choice(known)
        said = self.rng.choice(
            [
                frames.Settled(nonce),
                frames.Withdrawn(nonce, ABORTED),
                frames.Invite(b"nobody"),
                frames.Offering(
                    nonce=nonce, room=1, num_tokens=4, digest=bytes(16), start=0, places={}, weight_version=0
                ),
            ]
        )
        try:
            link.send(said)
        except Exception:  # it was found out
            link.close()

    # -- running -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        rng, net = self.rng, self.net
        net.now += rng.random() * 2 * TICK_S
        self.num_steps += 1
        for _ in range(len(net.works)):
            work = net.works.popleft()
            if rng.random() < 0.5:
                work()
            else:
                net.works.append(work)
        for engine in rng.sample(self.engines, 3):
            engine.turn()
        for part in [*self.prefill.parts.values()]:
            over = part.withdrawn or part.tail or "Broken" in part.events
            if not over and rng.random() < 0.2 and net.now >= self.prefill.deaf_until:
                self.prefill.send_some(part)
        for link in self.strangers:
            try:
                for frame in link.receive():
                    require(not isinstance(frame, frames.Fenced) or frame.nonce in self.seeds, "a fence of no ticket")
            except Exception:
                link.close()
        if net.num_altered and ("altered" not in {name for _, name in self.faults[-1:]}):
            self._fault("altered")

    def withdraw(self) -> None:
        for engine in self.engines:
            for part in engine.parts.values():
                over = part.is_over or part.withdrawn or {"Arrived", "Sent", "Broken"} & set(part.events)
                if not over and not (part.tail and not engine.is_decode) and self.rng.random() < self.weather.withdraws:
                    part.withdrawn = True
                    engine.worker.submit(Withdraw(part.ticket, ABORTED))

    def run(self) -> Outcome:
        self.net.alter, self.net.slow = self.weather.alters, self.weather.slows
        for _ in range(self.rng.randint(400, 1200)):
            for decode in self.decodes:
                if self.rng.random() < self.weather.offers:
                    self.offer(decode)
            self.withdraw()
            self.misbehave()
            self.tick()
        self.drain()
        return Outcome(offers=self.num_offers, arrived=self.num_arrived, broken=self.num_broken, steps=self.num_steps)

    def drain(self) -> None:
        """Faults have stopped: each ticket ends and is closed in time, and all places are as they were left."""
        self.net.alter, self.net.slow, self.weather = 0.0, 0.0, Weather(offers=0.0)
        for engine in self.engines:
            engine.deaf_until = engine.silent_until = 0.0
        if self.prefill.rests:
            self.prefill.rests = False
            self.prefill.worker.submit(Rest(asleep=False))
            self._fault("rest")
        until = self.net.now + REST_S
        while self.net.now < until and not self._is_idle:
            self.tick()
        for engine in self.engines:
            left = [part for part in engine.parts.values() if not part.is_over]
            require(not left, f"{engine.worker.instance} still has {left} after {REST_S} s")
            for kind, ids in engine.free.items():
                engine.check_canary(kind, ids)
                require(len(ids) == engine.shapes[kind].num_ids - 1, f"{kind} places are lost")
            require(engine.worker.num_unfenced == 0, "a ticket is unfenced although all are closed")
            side = engine.worker._stage
            tickets = side._receipts if isinstance(side, DecodeStage) else side._shipments.open
            require(not tickets, "tickets are kept")
            data = engine.worker._data_thread
            require(
                not (data.receiver.arrivals or data.sender.dropping or data.sender.ending),
                "the mover keeps a ticket",
            )
        late = [at for at in self.declined.values() if at > self.net.now - REST_S]
        calm = not self.faults
        require(not (calm and late), f"{len(late)} declines were never heard")
        self._offer_once_more()

    def _offer_once_more(self) -> None:
        """What comes behind all faults arrives, once the peers have heard from each other again."""
        before, quiet_until = self.num_arrived, self.net.now + 2 * SILENCE_S
        while self.net.now < quiet_until:
            self.tick()
        for decode in self.decodes:
            self.offer(decode)
        while self.net.now < quiet_until + REST_S and not self._is_idle:
            self.tick()
        require(self.num_arrived == before + len(self.decodes), "an offer behind all faults did not arrive")
        for engine in self.engines:
            data = engine.worker._data_thread
            kept = {*data.sender.outboxes, *data.receiver.readers} - engine.sessions
            links = len(engine.worker._loop.users)
            require(not engine.is_decode or links == len(engine.sessions), f"{links} links are read")
            require(not kept, f"{engine.worker.instance} moves bytes of sessions {kept}, which are over")

    @property
    def _is_idle(self) -> bool:
        return all(part.is_over for engine in self.engines for part in engine.parts.values())


def random_weather(rng: Random) -> Weather:
    if rng.random() < 0.25:
        return Weather(strangers=rng.choice([0.0, 0.05]), declines=rng.choice([0.0, 0.2]))
    return Weather(
        withdraws=rng.choice([0.0, 0.01]),
        cuts=rng.choice([0.0, 0.01]),
        kills=rng.choice([0.0, 0.003]),
        hangs=rng.choice([0.0, 0.005]),
        stalls=rng.choice([0.0, 0.005]),
        rests=rng.choice([0.0, 0.01]),
        alters=rng.choice([0.0, 0.01]),
        strangers=rng.choice([0.0, 0.02]),
        declines=rng.choice([0.0, 0.1]),
        slows=rng.choice([0.0, 0.01]),
    )


def run_seed(seed: int) -> Outcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        rng = Random(f"{seed} transfers")
        net = Net(rng)
        with replaced(net):
            return World(net, rng).run()
    except Exception as error:
        error.add_note(f"replay: python -m tests.transfer.simulation --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.transfer.simulation", __doc__ or "", run_seed, Outcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
