"""The files of the prefix cache as an engine stores and fetches rows there (C27, C30)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from forebay.base.errors import Conflict
from forebay.engine.lifecycle.tiers import EngineTiers
from forebay.formats import prefix_files
from forebay.formats.prefix_files import Record, Rows
from forebay.requests.step_plan import TierCopy
from forebay.runtime.host import disk_store
from forebay.runtime.host.disk_store import DiskStore
from forebay.runtime.host.tier_stores import LostRows, TierStores

ROW_BYTES = 8


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    mover: Any = SimpleNamespace(row_bytes={"kv": ROW_BYTES}, copied=lambda: None)
    made = DiskStore(mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    yield made
    made.close()


def copy_of(number: int) -> TierCopy:
    """Return a copy of one page into the slot with its number."""
    tokens = np.full(4, number, dtype=np.int32).tobytes()
    record = msgspec.msgpack.encode(Record("/n", "t", tokens, 0, {"kv": Rows([1], 0, [])}))
    return TierCopy(number=number, tier="disk", slots={}, there={"kv": np.array([number])}, record=record)


def put(store: DiskStore, number: int) -> TierCopy:
    copy = copy_of(number)
    store.store(copy, {"kv": torch.full((1, ROW_BYTES), number, dtype=torch.uint8)})
    return copy


@pytest.mark.parametrize("error", [RuntimeError("the copy failed"), MemoryError(), OSError(28, "No space left")])
def test_c27_disk_store_any_error_of_its_thread_turns_it_off_and_no_fetch_waits(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    first = put(store, 1)
    assert store.fetch(first)["kv"].tolist() == [[1] * ROW_BYTES]
    store.flush()
    with store._changed:
        store._closed = True
        store._changed.notify_all()
    store._thread.join()  # its work is done here from now on, where an error is seen
    monkeypatch.setattr(store._writer, "append", fail)
    copies = [put(store, number) for number in (2, 3)]
    store._run()
    for copy in copies:
        with pytest.raises(LostRows):
            store.fetch(copy)
    store.flush()
    assert not store.writes
    assert caplog.text.count("prefix_cache_write_failed") == 1
    assert store.fetch(first)["kv"].tolist() == [[1] * ROW_BYTES]


def test_disk_store_that_has_too_much_to_write_loses_the_copy_and_writes_what_comes_later(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = TierStores(SimpleNamespace(read=lambda places: rows), {"disk": store})  # type: ignore[arg-type]
    rows = {"kv": torch.ones((1, ROW_BYTES), dtype=torch.uint8)}
    monkeypatch.setattr(disk_store, "_MOST_QUEUED_BYTES", 0)
    stores.store(copy_of(1), {})
    assert stores.take_lost() == (1,)
    with pytest.raises(LostRows):
        store.fetch(copy_of(1))
    monkeypatch.undo()
    stores.store(copy_of(2), {})
    assert stores.take_lost() == ()
    assert store.fetch(copy_of(2))["kv"].tolist() == [[1] * ROW_BYTES]


def test_c29_disk_store_with_a_secret_that_others_can_read_is_off_with_one_line(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    store.close()
    (tmp_path / "secret").chmod(0o640)
    second = DiskStore(store._mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    assert prefix_files.usable_secret(str(tmp_path)) is None
    assert not second.writes
    assert [*second.records()] == []
    assert caplog.text.count("others could read it") == 1
    second.close()


def test_disk_store_of_a_folder_whose_secret_is_missing_says_so_in_one_line(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    store.close()
    (tmp_path / "secret").unlink()
    assert prefix_files.usable_secret(str(tmp_path)) is not None
    second = DiskStore(store._mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    assert len([*second.records()]) == 1
    second.close()
    assert caplog.text.count("prefix_cache_secret_missing") == 1


@pytest.mark.parametrize("damage", ["header", "cut", "folder", "pipe", "disk"])
def test_disk_store_segment_that_is_damaged_is_named_in_one_line_and_the_others_are_read(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    put(store, 1)
    store.close()
    (path,) = prefix_files.paths(tmp_path)
    other = tmp_path / "000002.prefixes"
    other.write_bytes(path.read_bytes())
    segment, _ = prefix_files.open_segment(path)
    if damage in ("folder", "pipe"):
        path.unlink()
        path.mkdir(mode=0o700) if damage == "folder" else os.mkfifo(path, 0o600)
    if damage == "header":
        data = bytearray(path.read_bytes())
        data[segment.first + 40] ^= 1
        path.write_bytes(data)
    if damage == "cut":
        os.truncate(path, segment.num_bytes - 1)
    if damage == "disk":
        fails_once = iter([OSError(errno.EIO, "Input/output error")])
        pread = os.pread

        def read(*where: int) -> bytes:
            if error := next(fails_once, None):
                raise error
            return pread(*where)

        monkeypatch.setattr(prefix_files.os, "pread", read)
    os.close(segment.descriptor)
    second = DiskStore(store._mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    assert len([*second.records()]) == 1
    second.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.split()[0] == ("prefix_segment_cut" if damage in ("header", "cut") else "prefix_segment_ignored")
    assert path.name in line


def test_disk_store_opens_no_more_segments_than_half_of_the_files_allowed(
    store: DiskStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    store.close()
    (path,) = prefix_files.paths(tmp_path)
    for number in range(2, 6):
        (tmp_path / f"00000{number}.prefixes").write_bytes(path.read_bytes())
    limits: list[tuple[int, int]] = [(4, 6)]
    monkeypatch.setattr(disk_store.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(disk_store.resource, "setrlimit", lambda _, limit: limits.append(limit))
    second = DiskStore(store._mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    assert limits[-1] == (6, 6)
    assert len([*second.records()]) == 3
    assert 'segments=2 reason="6 open files are allowed (ulimit -Hn)"' in caplog.text
    put(second, 1)
    second.flush()
    assert [path.stem[-1] for path in prefix_files.paths(tmp_path)] == ["1", "2", "4", "5", "6"], "3 was the oldest"
    second.close()


def test_disk_store_of_a_folder_that_another_one_writes_saves_nothing_and_says_so(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second: Any = object.__new__(EngineTiers)
    second._disk = DiskStore(store._mover, tmp_path, {"weights": "a"}, limit_bytes=1 << 20)
    with pytest.raises(Conflict, match="another server writes them"):
        second.save()
    second.close()
    second._disk = store
    second.save()
    monkeypatch.setattr(store._writer, "append", lambda *_: 1 / 0)
    put(store, 1)
    with pytest.raises(Conflict, match="ZeroDivisionError"):
        second.save()
