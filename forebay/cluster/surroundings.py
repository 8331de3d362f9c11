"""The changes that Ray makes to its workers, whose children inherit them, and how a server undoes them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.child import environment
from forebay.base.cpu import PROC
from forebay.cluster.messages import DEFAULT_GCS_TIMEOUT_S, DEFAULT_NICENESS, Message

NICENESS: Final = "RAY_worker_niceness"
GCS_TIMEOUT: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
AUTH_MODE: Final = "RAY_AUTH_MODE"
_OMP: Final = "OMP_NUM_THREADS"


class Surroundings(Message, frozen=True, kw_only=True):
    """The properties that a server's process sets itself first: those of the raylet, and its own cores, if any."""

    niceness: int
    oom_score_adj: int
    cpus: tuple[int, ...] = ()

    def as_text(self) -> str:
        """Return JSON, for an argument of `member.py`."""
        return msgspec.json.encode(self).decode()


def wanted(cpus: tuple[int, ...], raylet: int, proc: Path = PROC) -> Surroundings:
    """Return the properties of the raylet with this process id, which it had before Ray changed its worker's."""
    return Surroundings(
        niceness=os.getpriority(os.PRIO_PROCESS, raylet),
        oom_score_adj=int((proc / str(raylet) / "oom_score_adj").read_text()),
        cpus=cpus,
    )


def restore(target: Surroundings, proc: Path = PROC) -> None:
    """Set the properties of this process; SIGINT is no longer blocked. A property that needs a privilege stays as it
    is. Called before there are threads and child processes, which inherit all of it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    restore_priorities(target, proc)
    if target.cpus:
        os.sched_setaffinity(0, target.cpus)


def restore_priorities(target: Surroundings, proc: Path = PROC) -> None:
    """Set the niceness and the priority for the out-of-memory killer, as far as this process may."""
    with contextlib.suppress(PermissionError):  # of which `forebay cluster status` has a note
        os.setpriority(os.PRIO_PROCESS, 0, target.niceness)
    with contextlib.suppress(PermissionError):
        (proc / "self" / "oom_score_adj").write_text(str(target.oom_score_adj))


def read_surroundings(text: str) -> Surroundings:
    """Parse `Surroundings.as_text`."""
    return msgspec.json.decode(text, type=Surroundings)


def environment_of_server(raylet: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a server: without Ray's variables, a token among them, and with the raylet's
    OMP_NUM_THREADS, if any, instead of the one that Ray sets."""
    kept = {name: value for name, value in environment().items() if not name.startswith("RAY_") and name != _OMP}
    return kept | ({_OMP: raylet[_OMP]} if _OMP in raylet else {})


def environment_of_process(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    try:
        data = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    lines = (line.partition("=") for line in data.decode(errors="replace").split("\0") if "=" in line)
    return {name: value for name, _, value in lines}


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable of Ray's as a number, or Ray's default."""
    text = environment.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else default


def niceness_of(raylet: Mapping[str, str]) -> int:
    """Return the niceness that Ray adds to its workers."""
    return number(raylet, NICENESS, DEFAULT_NICENESS)


def gcs_timeout_s(raylet: Mapping[str, str]) -> int:
    """Return after how many seconds without the GCS a raylet ends itself, and all its actors with it."""
    return number(raylet, GCS_TIMEOUT, DEFAULT_GCS_TIMEOUT_S)


def note_of_niceness(pid: int, target: int) -> str:
    """Return a line about a process that could not lower its niceness; empty if it has the target one."""
    try:
        found = os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return ""
    if found <= target:
        return ""
    return f"its processes have niceness {found}, and may not lower it: start Ray with {NICENESS}=0"
