"""Listen until a signal, or the failure of the component behind the listener."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from forebay.base.errors import ConfigError
from forebay.base.exposure import check_exposure
from forebay.base.log import event, get_logger
from forebay.base.loop_clock import LoopClock
from forebay.base.signals import AT_ONCE, ENDING
from forebay.config.config import ServerConfig
from forebay.http.door import close_the_door
from forebay.http.lifecycle import Lifecycle
from forebay.http.protocol import protocol_class
from forebay.requests.updates import Failure

BACKLOG = 4096
OTHER_FILES = 256  # descriptors that are no connections
SAME_SIGNAL_S = 0.2  # `timeout` and some supervisors signal the process and then its group, which it is in
CLOSE_GRACE_S = 1  # for the last bytes of answers that are complete
FORCED_GRACE_S = 0.1  # for the last bytes of errors, when a second signal has ended the drain
DATE_S = 1.0  # the unit of an answer's date
POLL_S = 0.005

log = get_logger("server")


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket, before any slow start-up. Raises ConfigError if the address cannot be used, or would
    be open to the network without a key."""
    check_exposure(config.host, config.api_keys)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{config.host}:{config.port} cannot be used ({error.strerror}): stop what listens there, or give --port"
        ) from error
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


class Behind(Protocol):
    """The component behind the listener that does the work."""

    dead: Failure | None  # the root cause, once it can do none any more

    async def died(self) -> Failure:
        """Wait until the component fails, and return the cause."""

    async def close(self, drain_s: float) -> None:
        """End the requests in progress; each client gets an error."""


async def listen(
    config: ServerConfig,
    app: ASGIApp,
    lifecycle: Lifecycle,
    behind: Behind,
    *,
    sock: socket.socket | None = None,
    inherited: bool = False,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    on_user_signal: Callable[[], None] | None = None,
) -> None:
    """Serve `app` until SIGTERM, SIGINT, SIGHUP or `stop`, then drain for `config.drain_timeout_s`. A second signal, or
    any other that ends processes, ends the drain: requests in progress fail with an error. `config` must be the value
    that `fit_file_limit` returned when `app` was made.

    Owns `behind`, and closes it at the end. An `inherited` socket continues to listen for the next process. `on_ready`
    is called with the URL when the socket accepts, `on_user_signal` on SIGUSR1, which otherwise ends the drain as well.
    Raises the root cause (EngineError) if `behind` failed.
    """
    sock = sock or bind(config)
    clock = LoopClock()
    server = _Server(_uvicorn_config(config, app, clock))
    stop = stop or asyncio.Event()
    with _signals(stop, server, on_user_signal):
        running = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await _until_started(server, running)
            if on_ready is not None:
                on_ready(_url(config, sock))
            await _until_end(behind, stop, running)
        finally:
            lifecycle.draining = True
            grace = 0.0 if server.force_exit else config.drain_timeout_s
            await _drain(lifecycle, behind, server, clock, grace)
            await close_the_door(server, sock, 0.0 if server.force_exit else CLOSE_GRACE_S, stays_open=inherited)
            server.exit()
            await running
            sock.close()
    if behind.dead is not None and behind.dead.code != "shutting_down":
        raise behind.dead.error


def _uvicorn_config(config: ServerConfig, app: ASGIApp, clock: LoopClock) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_class(config, clock),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would stop accepting before the drain, where a 503 says more. So are its waits, which
    would delay each end by 0.2 s and wake an idle process ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def exit(self) -> None:
        """Close all connections and end `serve`."""
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """Renew the date of answers each second, until `exit`."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners and, as soon as they have answered, the connections. Cancels tasks that still run after
        the grace."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(FORCED_GRACE_S if self.force_exit else CLOSE_GRACE_S):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(stop: asyncio.Event, server: _Server, on_user_signal: Callable[[], None] | None) -> Iterator[None]:
    """Handle signals: the first one asks to stop, a later one ends the drain. A signal that was ignored (by `nohup`)
    stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    loop = asyncio.get_running_loop()
    first_at = math.inf

    def handle(number: signal.Signals) -> None:
        nonlocal first_at
        if number in AT_ONCE or loop.time() - first_at > SAME_SIGNAL_S:
            log.warning(event("forced_exit", signal=number.name))
            server.force_exit = True
        first_at = min(first_at, loop.time())
        stop.set()

    ignored = {number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN}
    handled = set(ENDING) - ignored | {signal.SIGTERM, signal.SIGINT}
    for number in handled:
        loop.add_signal_handler(number, handle, number)
    if on_user_signal is not None and signal.SIGUSR1 in handled:
        loop.add_signal_handler(signal.SIGUSR1, on_user_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # whoever started us may have held it back until now
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def _until_started(server: _Server, running: asyncio.Task[None]) -> None:
    while not server.started and not running.done():
        await asyncio.sleep(POLL_S)


async def _until_end(behind: Behind, stop: asyncio.Event, running: asyncio.Task[None]) -> None:
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(behind.died())
    try:
        await asyncio.wait({stopping, dying, running}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        dying.cancel()


async def _drain(lifecycle: Lifecycle, behind: Behind, server: _Server, clock: LoopClock, grace: float) -> None:
    """Running requests may finish; then the rest is ended with a typed error, and their handlers send it."""
    log.info(event("draining", requests=lifecycle.num_inside, grace_s=grace))
    empty = asyncio.create_task(lifecycle.wait_empty())
    forced = asyncio.create_task(_until(lambda: server.force_exit or behind.dead is not None))
    over = asyncio.create_task(clock.sleep(grace))
    await asyncio.wait({empty, forced, over}, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    over.cancel()
    await behind.close(drain_s=0.0)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(empty, CLOSE_GRACE_S)
    log.info(event("drained", requests=lifecycle.num_inside))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def _url(config: ServerConfig, sock: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


def fit_file_limit(config: ServerConfig) -> ServerConfig:
    """Connections need descriptors: the soft limit, which is often 1,024, is raised; where the hard one leaves no room
    for as many, fewer are taken, since one that cannot be accepted is not answered either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections * 2 + OTHER_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = limit - min(OTHER_FILES, limit // 2)
    if room >= config.max_connections:
        return config
    log.warning(event("fewer_connections", max_connections=room, reason=f"{limit} open files are allowed (ulimit -Hn)"))
    return replace(config, max_connections=room)
