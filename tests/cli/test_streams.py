"""Standard streams that are closed, or whose device is full, end no command with a signal or a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base import streams
from forebay.cli.startup_table import print_ready
from tests.deadlines import HANGS_S

FOREBAY = f"{sys.executable} -m forebay.cli.main"
CLOSED = "<&- >&- 2>&-"


def run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", f"{FOREBAY} {words}"], capture_output=True, text=True, timeout=HANGS_S)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (f"--version {CLOSED}", 0),
        (f"nothing {CLOSED}", 2),
        ("nothing 2>/dev/full", 2),
        ("--version >/dev/full 2>/dev/full", 1),
    ],
)
def test_main_streams_closed_or_full_exits_with_its_code(words: str, code: int) -> None:
    assert run(words).returncode == code


def test_main_stdout_full_reports_one_line() -> None:
    done = run("--version >/dev/full")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("forebay: error: No space left on device")


CHILD = """
import os, socket, subprocess, sys
from forebay.base.streams import open_standard_streams
open_standard_streams()
with socket.socket() as opened:
    assert opened.fileno() > 2, opened.fileno()
print("lost")
print("lost", file=sys.stderr)
sys.exit(subprocess.run([sys.executable, "-c", "import os; [os.fstat(i) for i in range(3)]"]).returncode)
"""


def test_open_standard_streams_closed_leaves_none_to_sockets_and_children(tmp_path: Path) -> None:
    """Without it a child process aborts: its descriptors 0 to 2 are whatever its parent opened first."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    done = subprocess.run(["sh", "-c", f"{sys.executable} {script} {CLOSED}"], timeout=HANGS_S)
    assert done.returncode == 0


def test_print_ready_stdout_full_goes_on_without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is not ended by the table that it prints."""
    kept = os.dup(1)
    try:
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), 1)
        with open(1, "w", closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            print_ready("http://127.0.0.1:1", 1.0, [("model", "m", "")], [])
            print("more")
            stdout.flush()
            assert os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_lossy_stderr_full_loses_text() -> None:
    with open("/dev/full", "w") as full:
        lossy = streams._lossy(full)
        assert lossy.write("lost\n") == len("lost\n")
        lossy.flush()
