"""A server under mixed traffic for as long as one likes (scorecard K-1): `python -m tests.soak.soak --minutes 20`.

Of the requests 30 % are given up in the middle, 5 % are wrong, 2 % break off before they are complete; the others must
bring the reference's tokens. After each block all of it must be as if nothing had been: no request anywhere, every pool
full, and no more memory, descriptors, threads or tasks than after the first blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from forebay.base.errors import EngineError
from forebay.base.http_client import Connection, Origin, encode_request
from forebay.engine.client.async_engine import AsyncEngine
from forebay.text.tokenizer import Tokenizer
from tests.deadlines import HANGS_S, NEVER_S
from tests.server.conftest import Running, start
from tests.server.process_status import num_fds, rss_bytes
from tests.soak.hash_engine import CONTEXT, EOS, VOCAB, SoakedRunner, hash_engine, reference
from tests.text.tiny_tokenizer import tiny_tokenizer

CLIENTS: Final = 24
WARM_UP: Final = 3  # blocks, until caches and allocators have what they want
BAD: Final[list[dict[str, Any]]] = [
    {"prompt": [1], "max_tokens": "many"},
    {"prompt": [VOCAB], "max_tokens": 1},
    {"prompt": [1] * CONTEXT, "max_tokens": 5},
    {"prompt": [1], "temprature": 1},
    {"prompt": [], "max_tokens": 1},
    {"prompt": [1], "n": 10**6},
]


@dataclass(frozen=True)
class Rest:
    """What an idle server holds."""

    requests: int
    rss: int
    blocks: int  # of Python's allocator
    fds: int
    threads: int
    tasks: int


@dataclass
class Told:
    """How requests have ended."""

    counts: dict[str, int] = field(default_factory=dict)

    def __call__(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class Soak:
    """A server, a hash engine, and clients, all in this process. Use as a context manager."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.told = Random(seed), Told()
        self.tokenizer: Tokenizer = tiny_tokenizer(VOCAB)
        self.engine = hash_engine()
        self.trunks = [[self.rng.randrange(3, VOCAB) for _ in range(90)] for _ in range(6)]
        self.rests: list[Rest] = []
        self.num_requests = 0

    def __enter__(self) -> Soak:
        # Clients and server share a process: what it gives up by the clock would be given up for both.
        self.server: Running = start(
            self.tokenizer,
            self.engine.connect,
            header_timeout_s=NEVER_S,
            keep_alive_s=NEVER_S,
            write_timeout_s=NEVER_S,
        )
        self.origin = Origin(self.server.url)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        assert self.engine.failure is None, self.engine.failure

    # -- traffic ------------------------------------------------------------------------------------------------------

    def block(self, count: int) -> Rest:
        """`count` requests, then rest."""
        asyncio.run(self._clients(count))
        self.num_requests += count
        assert self.engine.failure is None, self.engine.failure
        self.rests.append(self.rest())
        return self.rests[-1]

    async def _clients(self, count: int) -> None:
        left = iter(range(count))

        async def client(rng: Random) -> None:
            connection = await Connection.connect(self.origin)
            for _ in left:
                if not connection.is_open:
                    connection = await Connection.connect(self.origin)
                async with asyncio.timeout(HANGS_S):
                    await self._one(rng, connection)
            connection.close()

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(CLIENTS, count)):
                clients.create_task(client(Random(self.rng.random())))

    async def _one(self, rng: Random, connection: Connection) -> None:
        kind = rng.choices(["whole", "stream", "given up", "bad", "broken off"], [35, 28, 30, 5, 2])[0]
        self.told(kind)
        if kind == "bad":
            await connection.request("POST", "/v1/completions", rng.choice(BAD))
            assert connection.status == 400, connection.status
            return
        body = self._body(rng)
        if kind == "broken off":
            self._break_off(rng, body)
        elif kind == "given up":
            await self._give_up(rng, connection, body)
        else:
            await self._read(connection, body, streams=kind == "stream")

    def _body(self, rng: Random) -> dict[str, Any]:
        trunk = rng.choice(self.trunks)[: rng.randint(0, 90)]
        prompt = trunk + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
        return {"prompt": prompt, "max_tokens": rng.randint(1, 50), "seed": rng.getrandbits(40), "temperature": 0}

    async def _read(self, connection: Connection, body: dict[str, Any], *, streams: bool) -> None:
        events: list[bytes] = []
        options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
        data = await connection.request("POST", "/v1/completions", body | options, events.append)
        assert connection.status == 200, data
        if streams:
            assert events.pop() == b"[DONE]"
            chunks = [json.loads(event) for event in events]
        else:
            chunks = [json.loads(data)]
        self._check(body, chunks)

    def _check(self, body: dict[str, Any], chunks: list[dict[str, Any]]) -> None:
        right = reference(body["prompt"], body["seed"], body["max_tokens"])
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == self.tokenizer.decode(right)
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert ends == ["stop" if right[-1] == EOS else "length"]
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == len(right)
        assert usage["prompt_tokens"] == len(body["prompt"]) > usage["cache"]["cached_tokens"]
        if usage["cache"]["cached_tokens"]:
            self.told("hit")

    async def _give_up(self, rng: Random, connection: Connection, body: dict[str, Any]) -> None:
        """After some events, or before the first."""
        enough = rng.choice([0, 1, 3, 10])
        events: list[bytes] = []

        def take(event: bytes) -> None:
            events.append(event)
            if len(events) >= enough:
                connection.close()

        asked = asyncio.ensure_future(connection.request("POST", "/v1/completions", {**body, "stream": True}, take))
        if not enough:
            await asyncio.sleep(0.001 * rng.random())
            connection.close()
        with contextlib.suppress(EngineError):
            await asked

    def _break_off(self, rng: Random, body: dict[str, Any]) -> None:
        """A part of a request, and a reset instead of an end."""
        data = encode_request(self.origin, "POST", "/v1/completions", body)
        with self.server.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(data[: rng.randrange(1, len(data))])

    # -- at rest ------------------------------------------------------------------------------------------------------

    def rest(self) -> Rest:
        """Wait until nothing is left; what there still is then."""
        self.server.until(lambda: not self._left())
        gc.collect()
        with self.server.client() as client:
            inside = client.get("/debug/state").json()
        assert inside["server"]["num_inside"] == 0
        self._check_pools(inside)
        self.server.until(lambda: self._num_connections() == 0)
        return Rest(
            self.num_requests,
            rss_bytes(),
            sys.getallocatedblocks(),
            num_fds(),
            threading.active_count(),
            self.server.call(lambda: len(asyncio.all_tasks())),
        )

    def _left(self) -> dict[str, Any]:
        """By name, whatever an idle server must not have."""
        engine: AsyncEngine = self.server.engine  # type: ignore[assignment]
        core = self.engine.core
        scheduler, runner = core.scheduler, core._runner
        assert isinstance(runner, SoakedRunner)
        found = {
            "mailboxes": engine.link.mailboxes,
            "questions": engine.link._questions,
            "requests": scheduler.requests,
            "waiting": list(scheduler.queues.waiting),
            "in flight": list(core._in_flight),
            "deferred": list(scheduler.pools.deferred.entries),
            "on the host": scheduler.memory.host_copies._copies,
            "launched": list(runner.hashes.in_flight),
            "connections": self._num_connections(),
        }
        return {name: value for name, value in found.items() if value}

    def _num_connections(self) -> int:
        """Sockets that somebody is connected to us by."""
        port = f":{self.server.port:04X}"
        with open("/proc/self/net/tcp") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        return sum(row[1].endswith(port) and row[3] == "01" for row in rows)

    def _check_pools(self, state: dict[str, Any]) -> None:
        self.engine.core.scheduler.audit()
        for pool in state["pools"]:
            assert pool["running"] == pool["quarantined"] == 0, pool
            assert pool["free"] + pool["cached"] == pool["total"], pool
        assert state["counters"]["ledger_violations"] == state["counters"]["engine.step_failures"] == 0

    def growth(self, what: Callable[[Rest], int]) -> float:
        """Per request, from the end of the warm-up to now."""
        first, last = self.rests[WARM_UP - 1], self.rests[-1]
        return (what(last) - what(first)) / (last.requests - first.requests)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--block", type=int, default=1000, help="requests between two rests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    until = time.monotonic() + 60 * args.minutes
    with Soak(args.seed) as soak:
        while time.monotonic() < until or len(soak.rests) <= WARM_UP:
            print(soak.block(args.block), flush=True)
        print(soak.told.counts, soak.engine.core.scheduler.counters)
        print(
            f"bytes per request {soak.growth(lambda rest: rest.rss):.1f}, "
            f"blocks per request {soak.growth(lambda rest: rest.blocks):.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
