"""A command under a leash ends with its owner, and its children with it, whatever they do about signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.base.leash import Leash
from tests.deadlines import wait_until

ROOT = Path(__file__).parents[2]
# As a compiler's driver: the work is done by a child, which a signal to the parent does not reach.
DRIVER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", {work!r}, sys.argv[1]]).returncode)
"""
WORK = """
import os, sys
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
while True: pass
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WORK
OWNER = """
import signal, sys
from forebay.base.leash import Leash
from forebay.base.signals import ENDING
for number in ENDING:
    signal.signal(number, signal.SIG_IGN)  # as the engine does, and its children would
signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
with Leash() as leash:
    leash.run([sys.executable, "-c", *sys.argv[1:]])
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_what_a_command_did_is_what_comes_back() -> None:
    with Leash() as leash:
        done = leash.run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
        assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
        assert leash.run([sys.executable, "-c", "import os; os.abort()"]).returncode == 128 + signal.SIGABRT


@pytest.mark.parametrize("work", [WORK, STUBBORN], ids=["obedient", "deaf to SIGTERM"])
def test_letting_go_ends_the_children_of_what_runs(tmp_path: Path, work: str) -> None:
    file = tmp_path / "pid"
    with Leash() as leash:
        command = [sys.executable, "-c", DRIVER.format(work=work), str(file)]
        thread = threading.Thread(target=leash.run, args=(command,))
        thread.start()
        pid = pid_in(file)
        assert alive(pid)
    thread.join()
    wait_until(lambda: not alive(pid))


def test_a_killed_owner_leaves_nothing_running(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, DRIVER.format(work=WORK), str(file)], cwd=ROOT)
    pid = pid_in(file)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not alive(pid))
