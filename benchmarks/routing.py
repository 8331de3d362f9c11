"""What the router's selection brings, and what the router costs.

    python -m benchmarks.routing reuse      # prompt tokens reused by policy, in a simulation of 4 servers
    python -m benchmarks.routing trace      # the same over HTTP: two servers, and one with the memory of both
    python -m benchmarks.routing latency    # first byte and events a second, through the router and without it

`reuse`: 60 users with 12 turns each, in groups of 10 that share a system prompt (`--users-per-group`). A server keeps
the blocks that were used last, as many as fit in its memory, which is a share of what its users need (`MEMORIES`). A
turn takes time for the tokens that are not cached and for its answer. The router's code is the product's (`Selection`,
`Prefixes`). `exact` selects by what the servers do have cached, with the same threshold.

`trace`: the trace of `cache_trace.py`, with answers of one token.

`latency`: a server that streams 24 events, 15 ms apart, as any engine might; its own work is small.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from benchmarks.cache_trace import Turn, make_trace
from benchmarks.servers import started
from forebay.base.errors import ForebayError
from forebay.base.http_client import Origin, get_json, post_json
from forebay.bench.connection import LoadConnection
from forebay.bench.load import Timed, exchange
from forebay.route.announcement import Role
from forebay.route.membership import MemberRecord, Membership
from forebay.route.prefixes import BLOCK_BYTES
from forebay.route.selection import BALANCE_ABS_THRESHOLD, Policy, Selection, least_busy

NUM_SERVERS, NUM_USERS, NUM_TURNS, USERS_PER_GROUP = 4, 60, 12, 10  # a group has one system prompt
TOKENS_PER_BLOCK: Final = BLOCK_BYTES // 4
SYSTEM_BLOCKS, TURN_BLOCKS, ANSWER_BLOCKS = 12, (1, 3), (1, 6)
PREFILL_BLOCKS_PER_S, DECODE_BLOCKS_PER_S, THINK_S = 20.0, 0.5, 20.0
MEMORIES: Final = {"little": 0.35, "some": 0.5, "much": 4.0}
"""Shares of what the users of one server need."""
NUM_EVENTS, EVENT_S = 24, 0.015


# -- reuse, simulated --------------------------------------------------------------------------------------------------


@dataclass(order=True)
class Ask:
    """A user's next turn, at a time."""

    at: float
    user: int = field(compare=False)
    turn: int = field(compare=False)


class Cache:
    """The blocks of one server, of which those used least recently are evicted."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def cached(self, blocks: Sequence[bytes]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


@dataclass(frozen=True)
class Setting:
    """One column of the table. With several routers, each request goes to a random one."""

    name: str
    policy: Policy | None = Policy.CACHE_AWARE  # None: exact knowledge
    threshold: int = BALANCE_ABS_THRESHOLD
    num_routers: int = 1


SETTINGS: Final = (
    Setting("table"),
    Setting("exact", None),
    Setting("round_robin", Policy.ROUND_ROBIN),
    Setting("least_loaded", Policy.LEAST_LOADED),
    Setting("threshold 4", threshold=4),
    Setting("threshold 2", threshold=2),
    Setting("2 routers", num_routers=2),
    Setting("4 routers", num_routers=4),
)


class Service:
    """Servers, routers and users of one run."""

    def __init__(self, setting: Setting, memory: float, users_per_group: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._setting, self._users_per_group = setting, users_per_group
        answers = [[self._rng.randint(*ANSWER_BLOCKS) for _ in range(NUM_TURNS)] for _ in range(NUM_USERS)]
        turns = [[self._rng.randint(*TURN_BLOCKS) for _ in range(NUM_TURNS)] for _ in range(NUM_USERS)]
        self._answers = answers
        self._prompts = [list(self._prompts_of(user, turns[user], answers[user])) for user in range(NUM_USERS)]
        needed = sum(len(prompts[-1]) for prompts in self._prompts) / NUM_SERVERS
        self._caches = {f"http://s{i}:80": Cache(int(memory * needed)) for i in range(NUM_SERVERS)}
        self._routers = [self._router() for _ in range(setting.num_routers)]

    def _prompts_of(self, user: int, turns: Sequence[int], answers: Sequence[int]) -> Iterator[list[bytes]]:
        group = user // self._users_per_group
        blocks = [f"g{group} {i}".encode() for i in range(SYSTEM_BLOCKS)]
        for turn, (asked, answered) in enumerate(zip(turns, answers, strict=True)):
            blocks = [*blocks, *(f"u{user} {turn} {i}".encode() for i in range(asked))]
            yield blocks
            blocks = [*blocks, *(f"u{user} {turn} a{i}".encode() for i in range(answered))]

    def _router(self) -> tuple[Membership[MemberRecord], Selection]:
        members = Membership(lambda url, role, fixed: MemberRecord(url=url, role=role, is_configured=fixed))
        for url in self._caches:
            members.configure(url, Role.BOTH)
        for member in members.all:
            member.up = True
        policy = self._setting.policy or Policy.LEAST_LOADED
        return members, Selection(policy, self._setting.threshold)

    def reused(self) -> float:
        """Play all turns; the share of prompt tokens that were cached."""
        asks = [Ask(self._rng.uniform(0.0, THINK_S), user, 0) for user in range(NUM_USERS)]
        heapq.heapify(asks)
        ends: list[tuple[float, int, MemberRecord]] = []
        cached = total = number = 0
        while asks:
            ask = heapq.heappop(asks)
            while ends and ends[0][0] <= ask.at:
                heapq.heappop(ends)[2].in_flight -= 1
            blocks = self._prompts[ask.user][ask.turn]
            member = self._select(blocks)
            hit = self._caches[member.url].cached(blocks)
            cached, total, number = cached + hit, total + len(blocks), number + 1
            answer = [f"u{ask.user} {ask.turn} a{i}".encode() for i in range(self._answers[ask.user][ask.turn])]
            self._caches[member.url].use([*blocks, *answer])
            busy = 1 + member.in_flight / 4  # a batch makes each of its requests slower
            prefill_s, decode_s = (len(blocks) - hit) / PREFILL_BLOCKS_PER_S, 1 / DECODE_BLOCKS_PER_S
            end = ask.at + busy * (prefill_s + self._answers[ask.user][ask.turn] * decode_s)
            member.in_flight += 1
            member.num_requests += 1
            heapq.heappush(ends, (end, number, member))
            if ask.turn + 1 < NUM_TURNS:
                heapq.heappush(asks, Ask(end + self._rng.expovariate(1 / THINK_S), ask.user, ask.turn + 1))
        return cached / total

    def _select(self, blocks: Sequence[bytes]) -> MemberRecord:
        members, selection = self._rng.choice(self._routers)
        if self._setting.policy is not None:
            [member] = selection.select(members, blocks, 0.0).members
            return member
        least = least_busy(members.all)
        best = max(members.all, key=lambda member: (self._caches[member.url].cached(blocks), -member.in_flight))
        return best if best.in_flight - least.in_flight < self._setting.threshold else least


def reuse(num_seeds: int, users_per_group: int) -> None:
    """Print the table."""
    print(f"{'':14}" + "".join(f"{name:>9}" for name in MEMORIES))
    for setting in SETTINGS:
        shares = (
            sum(Service(setting, memory, users_per_group, seed).reused() for seed in range(num_seeds)) / num_seeds
            for memory in MEMORIES.values()
        )
        print(f"{setting.name:14}" + "".join(f"{share:9.1%}" for share in shares), flush=True)


# -- reuse, over HTTP --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(*words: str) -> AsyncIterator[Origin]:
    """A process of this package, and its address once it takes requests."""
    with ExitStack() as stack:
        _, url = await asyncio.to_thread(stack.enter_context, started(*words))
        origin = Origin(url)
        while True:
            try:
                await get_json(origin, "/ready")
                break
            except ForebayError:
                await asyncio.sleep(0.1)
        yield origin


async def _played(origin: Origin, trace: Sequence[Sequence[Turn]]) -> float:
    """The share of prompt tokens that were cached; conversations run side by side, as in `cache_trace.py`."""
    counts = [0, 0]

    async def converse(turns: Sequence[Turn]) -> None:
        for turn in turns:
            body = {"prompt": turn.prompt.tolist(), "max_tokens": 1, "temperature": 0}
            usage = (await post_json(origin, "/v1/completions", body))["usage"]
            counts[0] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts[1] += usage["prompt_tokens"]

    await asyncio.gather(*map(converse, trace))
    return counts[0] / counts[1]


async def trace(memory_mib: int) -> None:
    """Print the share of one server with the memory of both, and of two servers by policy."""
    played = make_trace(8, 10, False, 0)

    def served(mib: int) -> Any:
        words = (
            "--port=0",
            "--num-threads=1",
            "--log-level=error",
            "--queue-timeout=600",
            f"--kv-cache-bytes={mib << 20}",
        )
        return running("forebay", "serve", *words)

    print(f"two servers with {memory_mib} MiB of KV cache each")
    async with served(2 * memory_mib) as origin:
        print(f"{'one server':14}{await _played(origin, played):9.1%}", flush=True)
    for policy in Policy:
        async with served(memory_mib) as one, served(memory_mib) as other:
            words = ("--port=0", f"--policy={policy}", f"--server={one}", f"--server={other}")
            async with running("forebay", "route", *words) as router:
                print(f"{policy:14}{await _played(router, played):9.1%}", flush=True)


# -- latency -----------------------------------------------------------------------------------------------------------


async def _serve() -> None:
    """Answer as a server does that streams events, without a model."""
    event = b'data: {"choices":[{"text":" word","index":0}]}\n\n'
    info = b'{"disaggregation_mode":"null","weight_version":"0","served_model_name":"none"}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: (\d+)", request)
            await reader.readexactly(int(length[1]) if length else 0)
            if request.startswith(b"GET"):
                writer.write(head % b"application/json" + b"Content-Length: %d\r\n\r\n" % len(info) + info)
                continue
            writer.write(head % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(NUM_EVENTS):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await asyncio.sleep(EVENT_S)
            writer.write(b"0\r\n\r\n")

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(quietly, "127.0.0.1", 0, backlog=1024) as server:
        print(f"ready at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


async def _streams(origin: Origin, num_streams: int, seconds: float) -> tuple[list[float], float]:
    """Milliseconds to the first byte of each request, and events a second of all."""
    body = {"prompt": "x" * 2000, "max_tokens": NUM_EVENTS, "stream": True}
    answers: list[Timed] = []
    start = time.monotonic()

    async def one() -> None:
        connection = await LoadConnection.connect(origin)
        while time.monotonic() - start < seconds:
            answers.append(await exchange(connection, "/v1/completions", body))
        connection.close()

    await asyncio.gather(*(one() for _ in range(num_streams)))
    num_events = sum(len(answer.arrivals) for answer in answers)
    return [1e3 * (answer.arrivals[0] - answer.sent) for answer in answers], num_events / (time.monotonic() - start)


async def latency(repeats: int, seconds: float) -> None:
    """Print medians over repeats, each directly and through the router in turn."""
    async with AsyncExitStack() as servers:
        direct = await servers.enter_async_context(running("benchmarks.routing", "serve"))
        words = ("--port=0", "--log-level=error", f"--server={direct}")
        router = await servers.enter_async_context(running("forebay", "route", *words))
        print(f"{'streams':>8}{'':10}{'p50 ms':>9}{'p99 ms':>9}{'events/s':>10}")
        for num_streams in (1, 16, 64):
            found: dict[str, list[tuple[float, float, float]]] = {"direct": [], "router": []}
            for _ in range(repeats):
                for name, origin in (("direct", direct), ("router", router)):
                    firsts, speed = await _streams(origin, num_streams, seconds)
                    ordered = sorted(firsts)
                    found[name].append((median(ordered), ordered[int(0.99 * len(ordered))], speed))
            for name, rows in found.items():
                p50, p99, speed = (median(column) for column in zip(*rows, strict=True))
                print(f"{num_streams:8}  {name:8}{p50:9.2f}{p99:9.2f}{speed:10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reuse", "trace", "latency", "serve"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--users-per-group", type=int, default=USERS_PER_GROUP)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--memory-mib", type=int, default=256)
    args = parser.parse_args()
    match args.what:
        case "reuse":
            reuse(args.seeds, args.users_per_group)
        case "trace":
            asyncio.run(trace(args.memory_mib))
        case "latency":
            asyncio.run(latency(args.repeats, args.seconds))
        case "serve":
            asyncio.run(_serve())


if __name__ == "__main__":
    main()
