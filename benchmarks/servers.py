"""Run a server and see from outside when it answers, what memory it holds and what it computes."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import httptools
import psutil

from benchmarks.kinds import SLOT_TOKENS, Kind
from benchmarks.report import NOISE
from forebay.base.errors import EngineError
from forebay.base.http_client import Origin, get_json
from forebay.bench.load import send

START_LIMIT_S = 300.0
POLL_S = 0.01
IDLE_S = 1.0
MOMENT_S = 0.3
READY = re.compile(r"(?:ready|routing) at (\S+)")
_PROMPT = [1000 + 7 * i for i in range(8)]


class StartFailed(SystemExit):
    """A server ended, or did not answer, before its first token. A script that does not catch it ends with the log."""


class Server:
    """A server of our own, from its start to the end of the `with` block. `first_token_s` is the time from starting the
    process to the first event of a stream, asked for again and again from the start."""

    def __init__(self, kind: Kind, streams: int, model: str = "default", tokens: int = SLOT_TOKENS) -> None:
        self.kind = kind
        self.port = free_port()
        self.words = kind.words(port=self.port, streams=streams, model=model, tokens=tokens)
        self.first_token_s = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def origin(self) -> Origin:
        return Origin(self.url)

    def suits(self, streams: int, model: str, tokens: int) -> bool:
        return self.words == self.kind.words(port=self.port, streams=streams, model=model, tokens=tokens)

    def __enter__(self) -> Self:
        started = time.perf_counter()
        environment = {**os.environ, **self.kind.environment}
        self._process = subprocess.Popen(self.words, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        try:
            while not first_token(self.origin):
                if self._process.poll() is not None or time.perf_counter() - started > START_LIMIT_S:
                    raise StartFailed(f"{self.kind.title} did not start: {' '.join(self.words)}\n{self._tail()}")
                time.sleep(POLL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.first_token_s = time.perf_counter() - started
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            for process in self._tree():
                process.kill()
            self._process.wait()
        self._log.close()

    def pss_mb(self) -> float:
        """Memory of all its processes; pages that several share are divided among them."""
        return float(sum(process.memory_full_info().pss for process in self._tree()) / 1e6)

    def cpu_s(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._tree()))

    def _tree(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


@contextmanager
def started(module: str, *words: str) -> Iterator[tuple[int, str]]:
    """Run a module of this package that serves, until the block ends; its process id, and its URL once it has printed
    it. Ends the program if the process ends before."""
    command = [sys.executable, "-m", module, *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next((found[1] for line in process.stdout if (found := READY.match(line))), None)
            if url is None:
                raise StartFailed(f"{' '.join(command)} ended with code {process.wait()} before it was ready")
            yield process.pid, url
        finally:
            process.terminate()


@contextmanager
def served(*flags: str) -> Iterator[tuple[int, Origin]]:
    """Run `forebay serve` at a free port until the block ends; its process id and its address."""
    with started("forebay", "serve", "--port=0", "--log-level=error", *flags) as (pid, url):
        yield pid, Origin(url)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _stream_one_token(origin: Origin) -> bool:
    model = (await get_json(origin, "/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "stream": True}
    answer = await send(origin, "/v1/completions", body)
    return answer.status == 200 and bool(answer.arrivals)


def first_token(origin: Origin) -> bool:
    """Return whether a server streams a token; False if none listens, or if it is not ready."""

    async def ask() -> bool:
        async with asyncio.timeout(START_LIMIT_S):
            return await _stream_one_token(origin)

    try:
        return asyncio.run(ask())
    except (EngineError, OSError, KeyError, IndexError, httptools.HttpParserError):
        return False


class OtherWork:
    """What the machine computes from here on besides this process, its ended children and `server`; what the host of a
    virtual machine takes from it, too."""

    def __init__(self, server: Server | None = None) -> None:
        self._server = server
        self._started = time.perf_counter()
        self._before = self._seconds()

    def share(self) -> float:
        """Of all cores, since it was made. Clocks that count in ticks make it inexact for a moment's work."""
        seconds = max(0.0, self._seconds() - self._before)
        return seconds / (time.perf_counter() - self._started) / len(os.sched_getaffinity(0))

    def _seconds(self) -> float:
        busy = psutil.cpu_times()
        own = os.times()
        known = own.user + own.system + own.children_user + own.children_system
        known += self._server.cpu_s() if self._server else 0.0
        return float(busy.user + busy.nice + busy.system + busy.irq + busy.softirq + busy.steal) - known


def wait_until_quiet(limit_s: float) -> None:
    """Until others leave the machine alone for a moment, but no longer than this."""
    started = time.perf_counter()
    while time.perf_counter() - started < limit_s:
        other = OtherWork()
        time.sleep(MOMENT_S)
        if other.share() <= NOISE:
            break


def start_figures(kind: Kind) -> dict[str, float]:
    """One start, and the memory once it is idle again."""
    with Server(kind, streams=1) as server:
        time.sleep(IDLE_S)
        return {"first_token_s": server.first_token_s, "idle_pss_mb": server.pss_mb()}
