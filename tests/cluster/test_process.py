"""The process of an actor: its session, its input, its end and its log. Without Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster import process
from forebay.cluster.messages import LogPart, LogRequest
from forebay.cluster.process import Child, Log, log_folder
from forebay.cluster.surroundings import Surroundings
from tests.cluster.test_replica import FAKE, fake
from tests.deadlines import HANGS_S, wait_until

__all__ = ["fake"]  # a fixture
OWN = Surroundings(niceness=0, oom_score_adj=0)


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def child(sock: socket.socket, tmp_path: Path, *words: str) -> Child:
    return Child("serve", words, sock, Log(tmp_path / "server-1.log"))


def test_child_has_its_own_session_its_words_and_no_input(listening: socket.socket, tmp_path: Path) -> None:
    found = child(listening, tmp_path, "--a", "--b")
    assert found.pid == 0
    found.end(0.0)  # there is none yet
    before = len([*Path("/proc/self/fd").iterdir()])
    found.start(OWN, {"PATH": os.environ["PATH"], "MARK": "1"})
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    wait_until(lambda: "started with --a --b" in found._log.last_lines(1))
    assert found.wait(0.0) is None
    folder = Path(f"/proc/{found.pid}")
    words = (folder / "cmdline").read_text().split("\0")
    assert words[1:4] == [str(FAKE), "serve", OWN.as_text()]
    assert os.getsid(found.pid) == found.pid
    assert os.readlink(folder / "fd" / "0") == "/dev/null"
    assert os.readlink(folder / "fd" / "1") == os.readlink(folder / "fd" / "2") == str(found._log.path)
    assert b"MARK=1" in (folder / "environ").read_bytes().split(b"\0")
    found.end(HANGS_S)
    assert found.wait(0.0) == -signal.SIGTERM
    found.close()
    assert process.ENTRY != ("-P", "-m", "forebay.cluster.member")  # the fake's
    with pytest.raises(OSError):
        found.close()  # which has closed both ends


def test_child_that_does_not_listen_to_sigterm_is_killed(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(3600)"
    monkeypatch.setattr(process, "ENTRY", ["-c", code])
    found = child(listening, tmp_path)
    found.start(OWN, {})
    wait_until(lambda: found._log.last_lines(1) == "on")
    found.end(0.05)
    assert found.wait(0.0) == -signal.SIGKILL
    found.close()


def test_entry_is_the_member_s_module_without_the_folder_of_the_caller() -> None:
    code = "from forebay.cluster import process; print(*process.ENTRY, process.MAX_LOG_BYTES)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"-P -m forebay.cluster.member {64 << 20}\n"


def test_log_that_is_not_there_is_empty_and_a_long_one_ends_with_its_last_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "a" / "b" / "server-1.log")
    assert (log.read(LogRequest(offset=9)).text, log.read(LogRequest(offset=9)).next_offset) == (b"", 0)
    log.trim()
    log.path.write_bytes(b"first\n" + b"x" * (64 << 10))
    assert log.last_lines(2) == "x" * (64 << 10)  # of 64 KiB
    log.path.write_bytes(b"0123456789")
    whole = b"0123456789"
    for offset, text in ((-4, b"6789"), (-20, whole), (0, whole), (3, b"3456789"), (10, b""), (11, whole)):
        assert log.read(LogRequest(offset=offset)).text == text
    assert log.read(LogRequest(offset=2, max_bytes=3)) == LogPart(text=b"234", next_offset=5)
    descriptor = log.open()
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    assert log_folder() == Path(os.environ["HOME"]) / ".cache" / "forebay" / "cluster" / "logs"
