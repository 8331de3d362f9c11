"""The files of the prefix cache, whenever their writer is killed and whoever else had the folder (C30, C31, C33)."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from forebay.base.errors import ConfigError
from forebay.formats import prefix_files
from forebay.formats.prefix_files import Record, Rows, Unreadable, Writer

IDENTITY = {"version": "1", "weights": "a", "kernels": "native", "layout": "l"}
ROW_BYTES = 24


class Killed(BaseException):
    """The process was killed in a write."""


class Disk:
    """A file system whose writes can be cut: number `at` writes only `num_bytes(length)` of its bytes, and none
    follows."""

    def __init__(self, at: int, num_bytes: Callable[[int], int]) -> None:
        self.at, self.num_bytes, self.num_writes = at, num_bytes, 0

    def write(self, descriptor: int, data: memoryview) -> int:
        self.num_writes += 1
        if self.num_writes < self.at:
            return WRITE(descriptor, data)
        count = self.num_bytes(len(data)) if self.num_writes == self.at else 0
        WRITE(descriptor, data[:count])
        raise Killed


WRITE = os.write
CUTS: dict[str, Callable[[int], int]] = {
    "before": lambda length: 0,
    "first byte": lambda length: 1,
    "half": lambda length: length // 2,
    "but one byte": lambda length: length - 1,
    "after": lambda length: length,
}


def record_of(number: int) -> tuple[Record, list[memoryview]]:
    rows = [bytes([number, row]) * (ROW_BYTES // 2) for row in range(1 + number % 3)]
    sums = [xxhash.xxh3_64_intdigest(row) for row in rows]
    record = Record("/n", "t", bytes([number]) * 16, 0, {"kv": Rows([*range(1, len(rows) + 1)], ROW_BYTES, sums)})
    return record, [memoryview(row) for row in rows]


def records(folder: Path) -> list[Record]:
    """Read all that is there, and compare each row with its checksum."""
    found = []
    for path in prefix_files.paths(folder):
        try:
            segment, identity = prefix_files.open_segment(path)
        except Unreadable:
            continue
        assert identity == IDENTITY
        for begin, record in segment.records():
            data = memoryview(bytearray(record.num_bytes))
            segment.read(begin, record.num_bytes, data)
            for kind, _, at, checksum in record.places:
                assert xxhash.xxh3_64_intdigest(data[at : at + record.kinds[kind].row_bytes]) == checksum
            found.append(record)
        os.close(segment.descriptor)
    return found


def write_all(folder: Path, count: int) -> int:
    """Write records, two in a segment, until killed; return how many were written."""
    writer = Writer(folder, IDENTITY)
    for number in range(count):
        try:
            writer.append(*record_of(number))
        except Killed:
            return number
    writer.close()
    return count


@pytest.mark.parametrize("cut", CUTS)
def test_writer_killed_at_every_write_leaves_all_whole_records(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "SEGMENT_BYTES", 250)
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir(mode=0o700)
        disk = Disk(at, CUTS[cut])
        monkeypatch.setattr(prefix_files.os, "write", disk.write)
        whole = write_all(folder, 6)
        monkeypatch.setattr(prefix_files.os, "write", WRITE)
        found = records(folder)
        assert found[:whole] == [record_of(number)[0] for number in range(whole)]
        assert len(found) - whole in ((0, 1) if cut == "after" else (0,))
        added = len(found)
        write_all(folder, 2)  # the next process begins a segment of its own
        assert records(folder)[added:] == [record_of(number)[0] for number in range(2)]
        if disk.num_writes < at:
            assert whole == 6
            assert at > 12
            return


def test_writer_killed_by_the_system_leaves_all_that_it_has_reported(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        writer = Writer(tmp_path, IDENTITY)
        for number in itertools.count():
            writer.append(*record_of(number % 200))
            WRITE(write, bytes([number % 200]))
    os.read(read, 1)
    while len(os.read(read, 64)) < 64:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write)
    reported = 65
    while data := os.read(read, 4096):
        reported += len(data)
    os.close(read)
    found = records(tmp_path)
    assert len(found) >= reported
    assert found == [record_of(number % 200)[0] for number in range(len(found))]


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "after"])
def test_c29_secret_whose_writer_is_killed_is_made_anew(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files.os, "write", Disk(1, CUTS[cut]).write)
    with pytest.raises(Killed):
        prefix_files.folder_secret(tmp_path / "cache")
    monkeypatch.setattr(prefix_files.os, "write", WRITE)
    secret = prefix_files.folder_secret(tmp_path / "cache")
    assert len(secret) == 32
    assert prefix_files.folder_secret(tmp_path / "cache") == secret
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["secret"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_c29_secret_of_another_length_is_refused(content: bytes, tmp_path: Path) -> None:
    prefix_files.folder_secret(tmp_path / "cache")
    (tmp_path / "cache" / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=f"has {len(content)} bytes, not 32"):
        prefix_files.folder_secret(tmp_path / "cache")


def test_c29_secret_that_is_missing_is_another_one_afterwards(tmp_path: Path) -> None:
    first = prefix_files.folder_secret(tmp_path / "cache")
    (tmp_path / "cache" / "secret").unlink()
    assert prefix_files.folder_secret(tmp_path / "cache") != first


def test_c33_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    prefix_files.folder_secret(folder)
    monkeypatch.setattr("forebay.base.trust.os.geteuid", lambda: 4321)
    if os.stat(folder).st_uid == 0:  # root may write anywhere: its folders are trusted, but its secret is not ours
        with pytest.raises(ConfigError, match="others could read it"):
            prefix_files.folder_secret(folder)
        os.chown(folder, 1234, 1234)
    with pytest.raises(ConfigError, match="another user could write files in it"):
        prefix_files.prepare(folder)


def test_c33_segment_that_another_user_could_write_is_not_read(tmp_path: Path) -> None:
    write_all(tmp_path, 1)
    (path,) = prefix_files.paths(tmp_path)
    path.chmod(0o666)
    with pytest.raises(Unreadable, match="another could write it"):
        prefix_files.open_segment(path)


def test_segment_of_another_version_is_not_read(tmp_path: Path) -> None:
    write_all(tmp_path, 1)
    (path,) = prefix_files.paths(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"forebay-prefix-1", b"forebay-prefix-2", 1))
    with pytest.raises(Unreadable, match="does not begin as a segment of this version"):
        prefix_files.open_segment(path)


@pytest.mark.parametrize("name", IDENTITY)
def test_c31_identity_that_differs_in_one_part_names_both_values(name: str) -> None:
    assert prefix_files.difference(IDENTITY, IDENTITY) == ""
    found = prefix_files.difference(IDENTITY, {**IDENTITY, name: "other"})
    assert found == f"{name}: the file has {IDENTITY[name]!r}, this engine 'other'"
    assert prefix_files.difference({**IDENTITY, "more": "x"}, IDENTITY) == "more: the file has 'x', this engine None"


def test_every_flipped_byte_of_a_segment_is_found(tmp_path: Path) -> None:
    write_all(tmp_path, 2)
    (path,) = prefix_files.paths(tmp_path)
    data = path.read_bytes()
    whole = records(tmp_path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            found = records(tmp_path)
        except AssertionError:  # the checksum of a row, or the identity
            continue
        assert found == whole[: len(found)]
        assert len(found) < len(whole), f"byte {at} is not covered"


def test_lock_names_the_process_and_goes_with_it(tmp_path: Path) -> None:
    first = prefix_files.lock(tmp_path)
    assert first is not None
    assert prefix_files.lock(tmp_path) is None
    began = (tmp_path / "lock").read_text().split()[1]
    assert prefix_files.writer_of(tmp_path) == (
        f"process {os.getpid()}, which started {began} ticks after the machine,"
    )
    assert began.isdecimal()
    os.close(first)
    second = prefix_files.lock(tmp_path)
    assert second is not None
    os.close(second)
    (tmp_path / "lock").write_bytes(b"")
    assert prefix_files.writer_of(tmp_path) == "another process"
