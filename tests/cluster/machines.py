"""Clusters for tests with Ray: one of Forebay's own, and one of two machines, which are network namespaces."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.local import SETTINGS
from tests.deadlines import HANGS_S, wait_until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (forebay[ray])")
LOAD = Path(__file__).with_name("load.py")
SMALL = ("--dtype=float32", "--num-threads=1", "--kv-cache-bytes=32MiB", "--drain-timeout=30")


def processes(*words: str) -> list[int]:
    """Return the processes with all of these words in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and is_alive(int(entry.name)):
                command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                found += [int(entry.name)] * all(word in command for word in words)
    return found


def of_home(home: Path) -> list[int]:
    """Return the processes that were started with this home."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and is_alive(int(entry.name)):
                variables = (entry / "environ").read_text(errors="replace").split("\0")
                found += [int(entry.name)] * (f"HOME={home}" in variables)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Machines:
    """Runs commands as an operator of a cluster does. `words` follow each command, `before` comes before it."""

    def __init__(self, home: Path, *words: str, before: Sequence[str] = (), key: str = "") -> None:
        self.home, self.words, self.before, self.key = home, words, before, key
        self.env = {**os.environ, "HOME": str(home), "PYTHONUNBUFFERED": "1"}

    def run(self, action: str, *words: str | Path, code: int = 0) -> str:
        """Run `forebay cluster` and return its output. The exit code must be `code`."""
        done = subprocess.run(
            self._command(action, *words),
            capture_output=True,
            text=True,
            env=self.env,
            timeout=HANGS_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def begin(self, action: str, *words: str | Path) -> subprocess.Popen[str]:
        """Start `forebay cluster`, whose output can be read."""
        return subprocess.Popen(
            self._command(action, *words), stdout=subprocess.PIPE, text=True, env=self.env, stdin=subprocess.DEVNULL
        )

    def _command(self, action: str, *words: str | Path) -> list[str]:
        return [*self.before, sys.executable, "-m", "forebay", "cluster", action, *map(str, words), *self.words]

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the state of each actor, by name."""
        return {actor["name"]: actor for actor in json.loads(self.run("status", "--json"))["actors"]}

    def wait_ready(self, name: str, after: int = 0) -> dict[str, Any]:
        """Wait until a server is ready with another process than `after`, and return its state."""
        found: dict[str, Any] = {}

        def is_ready() -> bool:
            found.update(self.status().get(name, {}))
            return found.get("phase") == "ready" and found["pid"] != after

        wait_until(is_ready, lambda: str(found))
        return found

    def load(self, url: str, seconds: float) -> Load:
        """Start requests to a router in the background."""
        command = [*self.before, sys.executable, str(LOAD), url, str(seconds), "4", *([self.key] if self.key else [])]
        return Load(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


class Load:
    """Requests that run meanwhile."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def outcomes(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what became of each request."""
        output, _ = self._process.communicate(timeout=HANGS_S)
        return [json.loads(line) for line in output.splitlines()]


def codes(outcomes: Sequence[dict[str, Any]]) -> set[str]:
    """Return the codes of failures."""
    return {str(found["text"]) for found in outcomes if found["status"] != 200}


def tokens(outcomes: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the tokens of each prompt, which must be the same in all answers."""
    found: dict[int, list[int]] = {}
    for each in outcomes:
        if each["status"] == 200:
            assert found.setdefault(each["prompt"], each["text"]) == each["text"]
    return found


@contextlib.contextmanager
def local(home: Path) -> Iterator[Machines]:
    """A cluster of Forebay's own, which is not started here. Whatever runs at the end is ended."""
    machines = Machines(home)
    try:
        yield machines
    finally:
        for pid in of_home(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Pair(Machines):
    """Two machines: network namespaces with a cable between them. The head is `a`, where commands run."""

    addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}
    gcs = "10.77.0.1:6399"

    def __init__(self, home: Path, folder: Path) -> None:
        self.names = {side: f"fb{side}{os.getpid()}" for side in "ab"}
        self.key_file, self.cluster_key_file, token = (folder / name for name in ("keys", "cluster.key", "token"))
        for path in (self.key_file, self.cluster_key_file, token):
            path.write_text(os.urandom(32).hex())
            path.chmod(0o600)
        super().__init__(
            home,
            f"--address={self.gcs}",
            before=["ip", "netns", "exec", self.names["a"]],
            key=self.key_file.read_text(),
        )
        self.env |= {**SETTINGS, "RAY_AUTH_TOKEN_PATH": str(token)}
        self.folder = Path(f"/tmp/{self.names['a']}")
        self.secrets = [path.read_text() for path in (self.key_file, self.cluster_key_file, token)]

    @property
    def keys(self) -> tuple[str, str]:
        return f"--api-key-file={self.key_file}", f"--cluster-key-file={self.cluster_key_file}"

    def cable(self) -> None:
        a, b = self.names["a"], self.names["b"]
        for words in (
            f"netns add {a}", f"netns add {b}", f"link add v{a} netns {a} type veth peer name v{b} netns {b}",
            *(f"-n {self.names[side]} addr add {self.addresses[side]}/24 dev v{self.names[side]}" for side in "ab"),
            *(f"-n {name} link set lo up" for name in (a, b)), *(f"-n {name} link set v{name} up" for name in (a, b)),
        ):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True)

    def start(self, side: str, num_cpus: int) -> None:
        """Start Ray on one machine."""
        words = ["--head", "--port=6399", "--include-dashboard=false", "--no-monitor"]
        subprocess.run(
            [
                *("ip", "netns", "exec", self.names[side], sys.executable, "-m", "ray.scripts.scripts", "start"),
                *(words if side == "a" else [f"--address={self.gcs}"]),
                *(f"--node-ip-address={self.addresses[side]}", f"--num-cpus={num_cpus}", "--include-log-monitor=false"),
                *("--disable-usage-stats", f"--object-store-memory={80 << 20}", f"--temp-dir={self.folder / side}"),
            ],
            check=True, env=self.env, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=HANGS_S,
        )  # fmt: skip

    def cut(self, side: str, state: str) -> None:
        """Pull the cable of a machine (`down`), or plug it in (`up`)."""
        subprocess.run(["ip", "-n", self.names[side], "link", "set", f"v{self.names[side]}", state], check=True)

    def has_ended(self, side: str) -> bool:
        """End the processes of one machine, and return whether none is left."""
        self.kill(*self.on(side))
        return not self.on(side)

    def on(self, side: str, *words: str) -> list[int]:
        """Return the processes of one machine with all of these words in their arguments."""
        done = subprocess.run(["ip", "netns", "pids", self.names[side]], capture_output=True, text=True, check=True)
        return sorted({*map(int, done.stdout.split())} & {*processes(*words)})

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_machines(home: Path, folder: Path, cpus: tuple[int, int] = (2, 2)) -> Iterator[Pair]:
    """Two machines on which Ray runs. Everything there is ended."""
    pair = Pair(home, folder)
    try:
        pair.cable()
        pair.start("a", cpus[0])
        pair.start("b", cpus[1])
        yield pair
    finally:
        for side in "ab":
            wait_until(partial(pair.has_ended, side))
            subprocess.run(["ip", "netns", "del", pair.names[side]], check=False)
        subprocess.run(["rm", "-rf", str(pair.folder)], check=False)


def can_cable() -> bool:
    """Return whether this user may make network namespaces."""
    done = (
        subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True, check=False) if os.getuid() == 0 else None
    )
    return done is not None and done.returncode == 0


needs_namespaces = pytest.mark.skipif(not can_cable(), reason="no network namespaces can be made here")
