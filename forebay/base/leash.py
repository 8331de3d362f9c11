"""Commands that end with the process that runs them, and with all that they have started, however that process ends.

A compiler's driver does its work in child processes. None of them notices our death, and a signal to the driver alone
leaves them running at full load. So each command runs in a process group of its own, under a small process of ours that
holds one end of a pipe. When the other end closes, because we closed it or because we died, it ends the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Final, NoReturn, Self

GRACE_S: Final = 0.5  # to remove temporary files


class Leash:
    """Runs commands from any threads for the length of a `with` block; whatever still runs at its end is ended."""

    def __init__(self) -> None:
        self._theirs, self._ours = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._ours)
        os.close(self._theirs)

    def run(self, command: list[str], *, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` without a check, with what it wrote as text."""
        return subprocess.run(
            [sys.executable, "-I", "-S", __file__, *command],
            stdin=self._theirs,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            start_new_session=True,
        )


def _hold(command: list[str]) -> NoReturn:
    """In the process between. It may have been born with signals ignored or blocked, which the command must not be."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    released = threading.Event()

    def watch() -> None:
        os.read(0, 1)  # nothing is ever written: this is the other end's end
        released.set()
        os.killpg(0, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: None)  # ours comes after the grace
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    while released.is_set():  # what the command started may not have ended with it: SIGKILL ends us all
        time.sleep(GRACE_S)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _hold(sys.argv[1:])
