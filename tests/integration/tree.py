"""`forebay serve` as an operator starts it: a tree of two processes, on a port of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests import loopback
from tests.deadlines import wait_until
from tests.integration.forked import ROOT, Forked, can_fork, stock

# Settings that change numbers, of which a CPU, a checkpoint or a size chooses the defaults.
NUMBERS = ("dtype", "kv_cache_dtype", "mamba_ssm_dtype", "kernels", "quantization", "activation_bits")
_READY = re.compile(r"ready at (http://127\.0\.0\.1:(\d+))")


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    try:
        return [int(word) for task in tasks.iterdir() for word in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def child(pid: int, word: str) -> int:
    """The first of its children whose command has that word in it, as soon as there is one."""

    def found() -> list[int]:
        return [each for each in children(pid) if word in command(each)]

    wait_until(lambda: bool(found()))
    return found()[0]


def start(
    arguments: Sequence[str], variables: Mapping[str, str], output: int, before: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a new interpreter with these arguments, in a session of its own."""
    return subprocess.Popen(
        [*before, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**variables, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


class Tree:
    """The server process, in a process group of its own, and through it the engine. `words` follow `serve`: a model,
    flags; those of `before` precede the command. Output goes to `folder`. Its processes are forked; `fresh` ones, and
    those behind `before`, are new interpreters."""

    def __init__(
        self, folder: Path, *words: str | Path, before: Sequence[str] = (), fresh: bool = False, port: int = 0
    ) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._words = words
        self._log = folder / "output.txt"
        # A suite started in the background ignores SIGINT, and what it starts would inherit that: a child of a process
        # that has a handler begins with the default instead.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command = ["-m", "forebay.cli.main", "serve", "--port", str(port), *map(str, words)]
        variables = {**os.environ, "TMPDIR": str(self.temporary)}
        self.server: subprocess.Popen[bytes] | Forked
        with self._log.open("wb") as log:
            if fresh or before or not can_fork(variables):
                self.server = start(command, variables, log.fileno(), before)
            else:
                self.server = stock().start(command, variables, output=log.fileno(), own_session=True)
        self.url = ""
        self.port = 0

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int:
        return child(self.server.pid, "forebay.engine.loop.process")

    def wait_ready(self) -> Tree:
        wait_until(lambda: bool(_READY.search(self.output)) or self.server.poll() is not None, lambda: self.output)
        match = _READY.search(self.output)
        assert match is not None, self.output
        self.url, self.port = match[1], int(match[2])
        return self

    @property
    def computes(self) -> dict[str, str]:
        """The settings among its flags that decide the numbers of its answers: an engine that is compared with it takes
        them over, for what the CPU would choose is not what a flag says."""
        pairs = [str(word).removeprefix("--").partition("=") for word in self._words if str(word).startswith("--")]
        return {key: value for flag, _, value in pairs if (key := flag.replace("-", "_")) in NUMBERS}

    def client(self, **options: Any) -> httpx.Client:
        return loopback.client(base_url=self.url, **options)

    def state(self) -> dict[str, Any]:
        with self.client() as client:
            state: dict[str, Any] = client.get("/debug/state").json()
        return state

    def counted(self, name: str) -> float:
        """What only grows: the engine's counter of that name."""
        value: float = self.state()["counters"].get(name, 0)
        return value

    def pool(self, name: str) -> dict[str, int]:
        return next(pool for pool in self.state()["pools"] if pool["name"] == name)

    def is_clean(self) -> bool:
        """Nobody is served and nothing is held but by the cache."""
        state = self.state()
        return state["num_running"] == state["num_waiting"] == state["server"]["num_inside"] == 0 and all(
            pool["running"] == pool["quarantined"] == 0 for pool in state["pools"]
        )

    def healthy(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        """Whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()


@contextlib.contextmanager
def serving(folder: Path, *words: str | Path, before: Sequence[str] = (), fresh: bool = False) -> Iterator[Tree]:
    """A tree that is ready; killed at the end if it still runs."""
    tree = Tree(folder, *words, before=before, fresh=fresh)
    try:
        yield tree.wait_ready()
    finally:
        tree.end()
