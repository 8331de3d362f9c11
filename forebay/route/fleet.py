"""Server processes of this machine behind one router: started, watched, started again, and ended with it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from forebay.base import child
from forebay.base.errors import ConfigError
from forebay.base.exit_codes import EXIT_REFUSED
from forebay.base.log import event, get_logger
from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.requests.updates import Failure
from forebay.route.announcement import Role
from forebay.route.restarts import END_GRACE_S, LONG_LIFE_S, LONGEST_WAIT_S
from forebay.route.router import Router

ENTRY: Final = ("-P", "-m", "forebay.cli.member")
BACKLOG: Final = 1024

log = get_logger("route")


@dataclass(eq=False, slots=True)
class Server:
    """One process. The router owns its listening socket, so that connections made during a restart wait for the new
    process."""

    role: DisaggregationMode
    words: Sequence[str]  # of `forebay serve`
    sock: socket.socket
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    started_at: float = 0.0

    @property
    def origin(self) -> str:
        return "http://{}:{}".format(*self.sock.getsockname())


@dataclass
class Fleet:
    """All servers, for the length of a `with` block: its end terminates the running processes, as does the death of
    this process. `files` are descriptors from which they read their keys."""

    servers: list[Server]
    cluster_key: bytes = field(default=b"", repr=False)
    files: Sequence[int] = ()
    chaos: Chaos = field(default_factory=Chaos)
    _ending: bool = False
    _lease: tuple[int, int] = field(default_factory=os.pipe)

    def __enter__(self) -> Self:
        for server in self.servers:
            self._start(server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        processes = [server.process for server in self.servers if server.process is not None]
        child.end(processes, END_GRACE_S)
        for server in self.servers:
            server.sock.close()
        for fd in (*self._lease, *self.files):
            os.close(fd)

    def urls(self) -> dict[Role, list[str]]:
        """Return the addresses of the servers by role."""
        found: dict[Role, list[str]] = {}
        for server in self.servers:
            found.setdefault(Role(server.role), []).append(server.origin)
        return found

    def _start(self, server: Server) -> None:
        listening, lease = server.sock.fileno(), self._lease[0]
        server.process = child.start(
            [*ENTRY, str(listening), str(lease), *server.words],
            descriptors=[listening, lease, *self.files],
            own_session=True,  # the router acts on a terminal's signals
            label=str(server.role),
        )
        server.num_starts += 1
        server.started_at = time.monotonic()
        log.info(event("server_started", role=server.role, at=server.origin, pid=server.process.pid))

    def watch(self, router: Router) -> None:
        """Restart each server that ends, and notify the router; a server that cannot be served ends the fleet."""
        for server in self.servers:
            router.spawn(self._keep(server, router))
        for role, period_s in (
            (DisaggregationMode.PREFILL, self.chaos.kill_prefill_s),
            (DisaggregationMode.DECODE, self.chaos.kill_decode_s),
        ):
            if period_s:
                router.spawn(self._kill_now_and_then(role, period_s))

    async def _keep(self, server: Server, router: Router) -> None:
        wait_s = 0.5
        while True:
            assert server.process is not None
            code = await asyncio.to_thread(server.process.wait)
            if self._ending:
                return
            member = next(member for member in router.members.all if member.url == server.origin)
            router.members.lost(member, f"its process ended with code {code}")
            log.warning(event("server_ended", role=server.role, at=server.origin, code=code))
            if code == EXIT_REFUSED and not member.info:
                why = f"the {server.role} server cannot be started: see above"
                router.die(Failure.of(ConfigError(why)))
                return
            if time.monotonic() - server.started_at < LONG_LIFE_S:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                wait_s = 0.5
            self._start(server)

    async def _kill_now_and_then(self, role: DisaggregationMode, period_s: float) -> None:
        """About that often, so that it meets every state of a request."""
        while True:
            await asyncio.sleep(period_s * random.uniform(0.5, 1.5))
            server = random.choice([server for server in self.servers if server.role is role])
            if server.process is not None:
                log.warning(event("server_killed_on_purpose", role=role, at=server.origin))
                server.process.kill()
