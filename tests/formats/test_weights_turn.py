"""Turns at computing a file of the weights cache: one process at a time has it, and its end ends the turn."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.formats import weights_turn
from forebay.formats.weights_turn import turn
from tests.deadlines import NEVER_S

KEY = {"checkpoint": "a", "kernels": "native-avx2"}
OTHER = {**KEY, "checkpoint": "b"}


# Has the turn, says so, and keeps it until its input ends.
_HOLDER = """
import sys
from pathlib import Path
from forebay.formats.weights_turn import turn
from tests.deadlines import NEVER_S
with turn(Path(sys.argv[1]), {"checkpoint": "a", "kernels": "native-avx2"}, most_s=0, waiting=print) as had:
    print(had, flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLDER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_turn_nobody_else_is_had_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "weights"
    waited: list[Path] = []
    for _ in range(2):
        with turn(folder, KEY, most_s=0, waiting=waited.append) as had:
            assert had
            assert len(list(folder.iterdir())) == 1
        assert list(folder.iterdir()) == []
    assert waited == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_turn_of_another_key_is_had_beside_it(tmp_path: Path) -> None:
    waited: list[Path] = []
    with (
        turn(tmp_path, KEY, most_s=0, waiting=waited.append) as first,
        turn(tmp_path, OTHER, most_s=0, waiting=waited.append) as second,
    ):
        assert (first, second) == (True, True)
    assert waited == []


def test_turn_others_keep_it_too_long_is_not_had_and_stays_theirs(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        waited: list[Path] = []
        with turn(tmp_path, KEY, most_s=0, waiting=waited.append) as had:
            assert not had
        assert waited == list(tmp_path.iterdir())
    finally:
        process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["returns", "is killed"])
def test_turn_is_had_once_the_other_process_ends(end: str, tmp_path: Path) -> None:
    process = holder(tmp_path)

    def waiting(path: Path) -> None:
        if end == "is killed":
            process.send_signal(signal.SIGKILL)
        process.communicate()

    with turn(tmp_path, KEY, most_s=NEVER_S, waiting=waiting) as had:
        assert had
        assert process.returncode == (-signal.SIGKILL if end == "is killed" else 0)
    assert list(tmp_path.iterdir()) == []


def test_turn_file_was_replaced_before_it_was_locked_is_not_had_with_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removed it: who locks it then has the turn at nothing."""
    flock, calls = weights_turn.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (path,) = tmp_path.iterdir()
            path.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(weights_turn.fcntl, "flock", late)
    with turn(tmp_path, KEY, most_s=NEVER_S, waiting=lambda path: None) as had:
        assert had
        assert len(calls) == 2
        assert len(list(tmp_path.iterdir())) == 1


def test_turn_folder_that_cannot_be_made_or_has_no_locks_is_not_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    with turn(file / "weights", KEY, most_s=NEVER_S, waiting=lambda path: None) as had:
        assert not had

    def refuse(descriptor: int, how: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(weights_turn.fcntl, "flock", refuse)
    with turn(tmp_path, KEY, most_s=NEVER_S, waiting=lambda path: None) as had:
        assert not had
