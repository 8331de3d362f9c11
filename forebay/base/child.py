"""The start and the end of Python processes of this package: without this process's keys, and without the signals that
a terminal or a supervisor sends to a whole process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from forebay.base.cpu import CPU_VARIABLE, this_cpu
from forebay.base.fault import FAULT_VARIABLES
from forebay.base.package import ROOT
from forebay.base.relay import Relay
from forebay.base.signals import ENDING

_STDERR: Final = 2
_KEPT: Final = (CPU_VARIABLE, *FAULT_VARIABLES)


def start(
    arguments: Sequence[str],
    *,
    descriptors: Sequence[int],
    stdout: int | None = subprocess.DEVNULL,
    stderr: int | None = None,
    variables: Mapping[str, str] | None = None,
    own_session: bool = False,
    label: str = "child",
) -> subprocess.Popen[bytes]:
    """Start a Python process with these arguments of the interpreter, which inherits the `descriptors`. The caller ends
    it.

    Its environment is `environment()`, or `variables`. In a session of its own it gets no signal of a terminal. Other
    processes get them, blocked until they have set their handlers. Where this process relays its log, the relay reads
    what the child writes to standard error; `label` names the child there. Raises OSError.
    """
    relayed = Relay.running.open(label) if Relay.running is not None and stderr is None else None
    if relayed is not None:
        stdout, stderr = relayed if stdout == _STDERR else stdout, relayed
    with contextlib.ExitStack() as stack:
        if relayed is not None:
            stack.callback(os.close, relayed)
        if not own_session:
            stack.enter_context(_blocked(*ENDING))
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment() if variables is None else dict(variables),
            pass_fds=descriptors,
            start_new_session=own_session,
        )


def end(children: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Send SIGTERM to all, and SIGKILL to those that run `grace_s` later. Returns when all have ended."""
    running = list(children)
    for child in running:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in running:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals, in children that are started meanwhile too: these ignore them later, but not before Python has
    started, and a Ctrl-C at that moment reaches every process of a terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment() -> dict[str, str]:
    """Return this process's variables without FOREBAY_*, which may be keys, and with this package on PYTHONPATH. The
    variables of a simulated CPU stay, for the kernels of this package and of torch."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_") or k in _KEPT}
    kept |= this_cpu().library_limits
    inherited = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)
    return kept


def process_has_ended(process: int) -> bool:
    """Return whether the last thread of a process has ended; `process` is a descriptor of `os.pidfd_open`."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
