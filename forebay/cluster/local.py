"""Forebay's own Ray cluster on this machine: started by `forebay cluster up`, ended by `forebay cluster down`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.cpu import PROC
from forebay.base.errors import ConfigError, EngineError
from forebay.base.paths import cache_folder
from forebay.base.trust import private_folder
from forebay.cluster.messages import Message
from forebay.cluster.ports import listen_on_free_port
from forebay.cluster.surroundings import AUTH_MODE, GCS_TIMEOUT, NICENESS
from forebay.config.machine import usable_cores

START_TIMEOUT_S: Final = 120.0
END_GRACE_S: Final = 20.0
TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"
OBJECT_STORE_BYTES: Final = 80 << 20  # the least that Ray takes: messages are small
MAX_FOLDER_CHARS: Final = 22
_KEY_BYTES: Final = 32
# A node that is silent is declared dead after 4 x (1 + 1) s, not after 68 s.
SETTINGS: Final[Mapping[str, str]] = {
    AUTH_MODE: "token",
    NICENESS: "0",
    GCS_TIMEOUT: "600",
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}


class Head(Message, frozen=True, kw_only=True):
    """Where the GCS listens, and Ray's folder, which its processes have among their arguments."""

    address: str
    folder: str


def folder() -> Path:
    """Return this user's folder for clusters. It is created. Raises ConfigError if others could write it."""
    return private_folder(cache_folder("cluster"))


def key_file(name: str) -> Path:
    """Return a file with a random key that only this user can read. It is created once."""
    path = folder() / name
    with contextlib.suppress(FileExistsError), open(path, "x", opener=_private) as file:
        file.write(secrets.token_hex(_KEY_BYTES))
    return path


def started() -> Head | None:
    """Return the head that was started last and not stopped. Any of its processes may have ended since."""
    try:
        return msgspec.json.decode((folder() / "head.json").read_bytes(), type=Head)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def running() -> Head | None:
    """Return the head that runs, if any: its raylet, without which there are no servers."""
    head = started()
    return head if head and any("raylet" in command for _, command in _processes(head)) else None


def environment() -> dict[str, str]:
    """Return the variables that processes of this cluster need, the client among them."""
    return {**SETTINGS, TOKEN_PATH: str(key_file("token"))}


def start() -> Head:
    """Start a head node in the background. Raises EngineError if it does not start.

    Not with `--block`: that ends all of Ray's processes, and so all servers, when the GCS dies."""
    with listen_on_free_port("127.0.0.1") as probe:
        port = probe.getsockname()[1]
    head = Head(address=f"{_own_address()}:{port}", folder=tempfile.mkdtemp(prefix="ray-", dir=_private_folder()))
    (folder() / "head.json").write_bytes(msgspec.json.encode(head))
    command = [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
        *("--disable-usage-stats", f"--temp-dir={head.folder}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        f"--num-cpus={usable_cores().value}",
    ]
    log = folder() / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment()},
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(START_TIMEOUT_S) == 0:
                return head
    process.kill()
    process.wait()
    stop(head)
    last = " ".join(log.read_text(errors="replace").splitlines()[-3:])
    raise EngineError(f"Ray has not started: {last} (all of it is in {log})")


def _private_folder() -> Path:
    """Return a folder of this user for Ray's, which Ray makes writable for all users. The paths of Ray's sockets are 84
    characters longer, and those of unix sockets have 107 at most."""
    private = Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"
    if len(str(private)) > MAX_FOLDER_CHARS:
        private = Path("/tmp") / private.name
    return private_folder(private)


def stop(head: Head) -> None:
    """End all processes of the head node, and remove Ray's folder."""
    for number, grace_s in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, END_GRACE_S)):
        for pid, _ in _processes(head):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if any(not list(_processes(head)) for _ in _until(grace_s)):
            break
    shutil.rmtree(head.folder, ignore_errors=True)
    (folder() / "head.json").unlink(missing_ok=True)


def _processes(head: Head) -> Iterator[tuple[int, str]]:
    """Yield the processes of this user that have Ray's folder among their arguments."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and head.folder in (
                command := (entry / "cmdline").read_text(errors="replace")
            ):
                yield int(entry.name), command


def connect_address(address: str, *, may_start: bool) -> str:
    """Return the address of the cluster that a command means. Sets the variables with which this process connects.
    Raises ConfigError if it is Forebay's own, which does not run."""
    if address:
        return address
    os.environ.update(environment())
    if head := running():
        return head.address
    left = [pid for pid, _ in _processes(cut)] if (cut := started()) else []
    if not may_start and left:
        raise ConfigError(
            f"Ray was not started whole on this machine, or is being started: {len(left)} of its processes run, and no "
            "server. If no forebay cluster up runs, end them with forebay cluster down"
        )
    if not may_start:
        raise ConfigError("no cluster of Forebay's runs on this machine: forebay cluster up, or give --address")
    if cut is not None:
        print(f"ending what is left of an earlier Ray: {len(left)} processes", flush=True)
        stop(cut)
    print("starting Ray on this machine", flush=True)
    return start().address


def _own_address() -> str:
    """Return the address under which Ray registers a node that is started at 127.0.0.1."""
    from ray._private.services import resolve_ip_for_localhost

    return str(resolve_ip_for_localhost("127.0.0.1"))


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
