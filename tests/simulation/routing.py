"""The router's members, selection, retries and health checks before servers that come and go, in virtual time.

    python -m tests.simulation.routing --seeds 0:2000

The router's code is the product's, down to the HTTP of its connections. Simulated are time, servers, and the network:
announcements are lost, doubled and late; servers die, drain, fall silent, change weights and are started again at the
same URL; the router's clock and those of machines jump. Every request ends once, with one server's answer to it or with
a typed error, within `MOST_S`. No request is sent to a server that is known to drain or to be gone, whose lease has
expired, or whose last check failed. Once the chaos is over, all servers serve again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from forebay.base.errors import ForebayError
from forebay.config.engine_config import DisaggregationMode
from forebay.http.lifecycle import Watch
from forebay.route.announcement import ANNOUNCE_INTERVAL_S, LEASE_S, Announcement, Role, State
from forebay.route.exchange import MOST_ATTEMPTS, RoutedRequest, first_answer
from forebay.route.members import Member, Members
from forebay.route.selection import Policy, Reason, Selected, Selection
from tests.simulation.command_line import command_line
from tests.simulation.violation import Violation, require
from tests.simulation.virtual_time import VirtualLoop

CHAOS_S: Final = 40.0
CALM_S: Final = 45.0  # the latest announcement, a lease that it begins, and checks
NUM_REQUESTS: Final = 60
MOST_S: Final = 60.0  # of a request: three attempts at servers that fall silent
NUM_CHATS: Final = 8
MODES: Final = {
    Role.BOTH: DisaggregationMode.NULL,
    Role.PREFILL: DisaggregationMode.PREFILL,
    Role.DECODE: DisaggregationMode.DECODE,
}


@dataclass
class RoutingOutcome:
    """What happened in some seeds."""

    seeds: int = 1
    steps: int = 0
    answered: int = 0
    failed: int = 0
    left: int = 0
    retries: int = 0
    prefixes: int = 0
    refused_announcements: int = 0
    digest: str = ""

    def __add__(self, other: RoutingOutcome) -> RoutingOutcome:
        names = [name for name in vars(self) if name != "digest"]
        digest = hashlib.sha256((self.digest + other.digest).encode()).hexdigest()[:16]
        return RoutingOutcome(**{name: getattr(self, name) + getattr(other, name) for name in names}, digest=digest)


class Wire:
    """The server's end of one connection."""

    def __init__(self, process: Process, protocol: Any) -> None:
        self._process, self._protocol = process, protocol
        self._closed = False
        process.wires[self] = None
        protocol.connection_made(self)

    def get_extra_info(self, name: str) -> None:
        """There is no socket."""

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.wires.pop(self, None)
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def write(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        headers = dict(line.decode().split(": ", 1) for line in head.split(b"\r\n")[1:])
        self._process.take(self, method, path, headers, body)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))

    def send(self, data: bytes) -> None:
        if not self._closed and not self._process.is_silent:
            self._protocol.data_received(data)


@dataclass(eq=False)
class Process:
    """One start of a server."""

    world: World
    place: Place
    instance: str
    state: State = State.STARTING  # in truth
    is_silent: bool = False
    num_updates: int = 0
    wires: dict[Wire, None] = field(default_factory=dict)

    def end(self) -> None:
        self.state = State.GONE
        for wire in list(self.wires):
            wire.close()

    def take(self, wire: Wire, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        if path == "/ready":
            self.world.spawn(self._answer_check(wire))
        elif path == "/server_info":
            self.world.spawn(self._answer_info(wire))
        else:
            self.world.request_arrived(self, headers["x-request-id"])
            self.world.spawn(self._generate(wire, headers["x-request-id"]))

    async def _answer_check(self, wire: Wire) -> None:
        await asyncio.sleep(self.world.rng.uniform(0.0, 0.05))
        is_ready = self.state is State.READY
        if not self.is_silent and not is_ready:
            self.world.checks_failed[self.place.url] = self.world.now
        wire.answer(200 if is_ready else 503, {"reason": "ok" if is_ready else str(self.state)})

    async def _answer_info(self, wire: Wire) -> None:
        await asyncio.sleep(self.world.rng.uniform(0.0, 0.05))
        if not wire.is_closing() and not self.is_silent:
            self.world.checks_failed.pop(self.place.url, None)
            self.world.reported[self.place.url] = self.num_updates, self.world.now
        mode = MODES[self.place.role]
        wire.answer(200, {"disaggregation_mode": mode, "weight_version": str(self.num_updates)})

    async def _generate(self, wire: Wire, name: str) -> None:
        rng = self.world.rng
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        if self.state is not State.READY and rng.random() < 0.8:
            wire.answer(503, {"error": {"message": "not ready", "code": str(self.state)}})
            return
        if rng.random() < 0.05:
            wire.answer(rng.choice([400, 429, 503, 504]), {"error": {"message": "no", "code": "no"}})
            return
        if self.place.role is not Role.PREFILL and not wire.is_closing() and not self.is_silent:
            self.world.first_bytes[name] = self.instance
        wire.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(rng.randrange(1, 5)):
            piece = f"{name} {self.instance};".encode()
            wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        wire.send(b"0\r\n\r\n")


@dataclass(eq=False)
class Place:
    """One URL, where processes of one role run one after the other, and the machine that announces them."""

    world: World
    url: str
    role: Role
    is_announced: bool
    clock_ns: int = 0  # of the machine, less the loop's time
    process: Process | None = None
    weights: int = 0

    async def run(self) -> None:
        """Start processes and end them, until the chaos is over; the last one stays."""
        rng, world = self.world.rng, self.world
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        while True:
            process = self.process = Process(world, self, f"{rng.getrandbits(128):032x}")
            announcing = world.spawn(self._repeat(process))
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            process.state = State.READY
            await self._say(process, State.READY)
            await self._live(process)
            if world.calm:
                await asyncio.Event().wait()
            if rng.random() < 0.5:
                await self._drain(process)
            announcing.cancel()
            process.end()
            world.note("ended", self.url)
            if rng.random() < 0.3:
                self.clock_ns = rng.randrange(10**12)  # the machine was started again
            await asyncio.sleep(rng.uniform(0.0, 4.0))

    async def _live(self, process: Process) -> None:
        rng, world = self.world.rng, self.world
        until = world.now + rng.expovariate(1 / 25)
        while not world.calm and world.now < until:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            if rng.random() < 0.08:
                process.is_silent = True
                await asyncio.sleep(rng.uniform(0.5, 14.0))
                process.is_silent = False
                for wire in list(process.wires):  # what was lost is lost
                    wire.close()
            elif rng.random() < 0.15:
                process.num_updates += 1
                self.weights += 1
        if world.calm:
            process.num_updates = 0

    async def _drain(self, process: Process) -> None:
        """As `forebay cluster`: the router first, then the server."""
        await self._say(process, State.DRAINING)
        await asyncio.sleep(self.world.rng.uniform(0.0, 1.0))
        process.state = State.DRAINING
        await asyncio.sleep(self.world.rng.uniform(0.0, 3.0))
        if self.world.rng.random() < 0.7:
            await self._say(process, State.GONE)

    def _announcement(self, process: Process, state: State) -> Announcement:
        return Announcement(
            url=self.url,
            role=self.role,
            instance=process.instance,
            weight_version=f"v{self.weights}" if self.role is Role.BOTH else "v",
            state=state,
            sequence=self.clock_ns + int(self.world.now * 1e9),
        )

    async def _say(self, process: Process, state: State) -> None:
        self.said = state
        if self.is_announced:
            self.world.post(self._announcement(process, state))
            await asyncio.sleep(0.001)  # no two announcements have one time

    async def _repeat(self, process: Process) -> None:
        self.said = State.STARTING
        while self.is_announced:
            self.world.post(self._announcement(process, self.said))
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)


class World:
    """One seed."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.rng, self.loop = Random(seed), loop
        self.calm = False
        self.outcome = RoutingOutcome()
        self._log = hashlib.sha256()
        self._tasks: list[asyncio.Task[Any]] = []
        self._clock_offset = 0.0
        self._stopped: set[str] = set()  # instances that the router knows to drain or to be gone
        self._renewed: dict[str, float] = {}  # leases, by the router's clock
        self.checks_failed: dict[str, float] = {}  # by URL: when, if the last check did
        self.reported: dict[str, tuple[int, float]] = {}  # weight versions, and when
        self.first_bytes: dict[str, str] = {}
        self._instances: dict[str, list[str]] = {}  # that each request was sent to
        loop.connect = self._connect
        self.places = self._places()
        configured = [place for place in self.places if not place.is_announced or self.rng.random() < 0.3]
        self._configured = {place.url for place in configured}
        urls = {role: [place.url for place in configured if place.role is role] for role in Role}
        selection = Selection(self.rng.choice([*Policy, Policy.CACHE_AWARE]), self.rng.choice([1, 8]))
        self.members = Members(urls, selection=selection, clock=lambda: loop.time() + self._clock_offset)

    def _places(self) -> list[Place]:
        shapes: list[list[Role]] = [[Role.BOTH] * self.rng.randrange(2, 5), [*(Role.PREFILL, Role.DECODE) * 2]]
        roles = self.rng.choice([*shapes, [*shapes[0], *shapes[1]]])
        return [
            Place(self, f"http://h{i}:80", role, self.rng.random() < 0.75, self.rng.randrange(10**12))
            for i, role in enumerate(roles)
        ]

    @property
    def now(self) -> float:
        return self.loop.time()

    def note(self, *words: object) -> None:
        self.outcome.steps += 1
        self._log.update(repr((round(self.now, 6), *words)).encode())

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.append(task)
        return task

    async def _connect(self, factory: Any, host: str, port: int) -> tuple[Any, Any]:
        place = next(place for place in self.places if place.url == f"http://{host}:{port}")
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        process = place.process
        if process is not None and process.is_silent:
            await asyncio.Event().wait()
        if process is None or process.state is State.GONE:
            self.checks_failed[place.url] = self.now
            raise OSError("connection refused")
        protocol = factory()
        return Wire(process, protocol), protocol

    # Announcements

    def post(self, announcement: Announcement) -> None:
        """Send an announcement over the network, which is perfect once the chaos is over."""
        if self.calm:
            self.spawn(self._deliver(announcement, 0.01))
            return
        chance = self.rng.random()
        for _ in range(0 if chance < 0.15 else 2 if chance < 0.3 else 1):
            late = self.rng.random() < 0.15
            self.spawn(self._deliver(announcement, self.rng.uniform(0.0, 25.0 if late else 0.3)))

    async def _deliver(self, announcement: Announcement, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            self.members.announce(announcement, self.members.now)
        except ForebayError as error:
            self.outcome.refused_announcements += 1
            self.note("refused", announcement.url, error.code)
            return
        self.note("announced", announcement.url, announcement.state)
        self._renewed[announcement.url] = self.members.now
        if announcement.state in (State.DRAINING, State.GONE):
            self._stopped.add(announcement.instance)

    # Requests

    def request_arrived(self, process: Process, name: str) -> None:
        """Check that a request may be sent to this process now."""
        url, router_now = process.place.url, self.members.now
        self.note("sent", name, url)
        require(process.instance not in self._stopped, f"{name} was sent to {url}, which drains or is gone")
        if url not in self._configured:
            require(router_now < self._renewed[url] + LEASE_S, f"{name} was sent to {url}, whose lease has expired")
        failed_at = self.checks_failed.get(url, self.now)
        require(failed_at == self.now, f"{name} was sent to {url}, whose check failed at {failed_at:.3f}")
        if process.place.role is Role.BOTH:
            require(name not in self.first_bytes, f"{name} was sent again after its first byte")
            require(process.instance not in self._instances[name], f"{name} was sent to {url} twice")
        self._instances[name].append(process.instance)
        require(len(self._instances[name]) <= 2 * MOST_ATTEMPTS, f"{name} was sent too often")

    def _selected(self, name: str, selected: Selected[Member]) -> None:
        self.outcome.retries += selected.reason is Reason.RETRY
        self.outcome.prefixes += selected.reason is Reason.PREFIX
        found = [self.reported[member.url] for member in selected.members]
        if all(at < self.now for _, at in found):
            require(len({version for version, _ in found}) == 1, f"{name} was sent to two versions: {found}")

    async def _client(self, number: int, *, must_answer: bool = False) -> None:
        name, rng = f"r{number}", self.rng
        self._instances[name] = []
        chat = rng.randrange(NUM_CHATS)
        blocks = [f"{chat} {i}".encode() for i in range(rng.randrange(4))]
        leaves_s = rng.uniform(0.0, 3.0) if rng.random() < 0.1 and not must_answer else MOST_S

        async def receive() -> dict[str, str]:
            await asyncio.sleep(leaves_s)
            return {"type": "http.disconnect"}

        routed = RoutedRequest(
            path="/v1/completions",
            headers={"x-request-id": name},
            content=b"{}",
            select=partial(self.members.select, blocks),
            on_selected=partial(self._selected, name),
            on_failed=lambda selected, error: None,
        )
        with Watch(receive) as watch:
            end = await asyncio.wait_for(self._ended(name, routed, watch), MOST_S)
        self.note("end", name, end)
        require(not must_answer or end == "answered", f"{name} is not answered after the chaos: {end}")

    async def _ended(self, name: str, routed: RoutedRequest, watch: Watch) -> str:
        """The end of a request, which is counted."""
        exchange = None
        try:
            exchange, _ = await first_answer(self.members, routed, watch)
            body = await exchange.answering.upstream.whole()
            require({*body.decode().split(";")} == {f"{name} {self.first_bytes[name]}", ""}, f"{name} got {body!r}")
            self.outcome.answered += 1
            return "answered"
        except ForebayError as error:
            if watch.gone:
                self.outcome.left += 1
                return "left"
            if exchange is not None:
                exchange.note_lost(self.members, error)
            self.outcome.failed += 1
            return error.code
        finally:
            if exchange is not None:
                if exchange.answering.upstream.at_rest:
                    await exchange.drain()
                exchange.end()

    # All of it

    async def run(self) -> RoutingOutcome:
        """Play the seed; return what happened, or raise Violation."""
        for place in self.places:
            self.spawn(place.run())
        self.spawn(self.members.health.watch())
        self.spawn(self._jump_clock())
        clients = []
        for number in range(NUM_REQUESTS):
            await asyncio.sleep(self.rng.expovariate(NUM_REQUESTS / CHAOS_S))
            clients.append(self.loop.create_task(self._client(number)))
        self.calm = True
        await asyncio.gather(*clients)
        await asyncio.sleep(CALM_S)
        for member in self.members.all:
            require(
                not member.obstacle(self.members.now), f"{member.url} is not used: {member.obstacle(self.members.now)}"
            )
            require(member.in_flight == 0, f"{member.url} has {member.in_flight} requests that have ended")
        require(len(self.members.all) == len(self.places), "members are missing, or are too many")
        failed = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        for error in filter(None, failed):
            raise error
        self.outcome.digest = self._log.hexdigest()[:16]
        return self.outcome

    async def _jump_clock(self) -> None:
        while not self.calm:
            await asyncio.sleep(self.rng.expovariate(1 / 20))
            if self.rng.random() < 0.5 and not self.calm:
                self._clock_offset += self.rng.uniform(0.0, 40.0)

    async def close(self) -> None:
        self.members.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def run_routing(seed: int) -> RoutingOutcome:
    """Play one seed."""
    loop = VirtualLoop()

    async def main() -> RoutingOutcome:
        world = World(seed, loop)
        try:
            return await world.run()
        except TimeoutError:
            raise Violation(f"a request has not ended within {MOST_S:g} s") from None
        finally:
            await world.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


def main(argv: Sequence[str] | None = None) -> int:
    about = "The router before servers that come and go."
    return command_line("tests.simulation.routing", about, run_routing, RoutingOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())
