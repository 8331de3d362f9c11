"""The files of the prefix cache as an engine stores and fetches rows there (C27, C30)."""

from __future__ import annotations

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
from forebay.formats.prefix_files import Record, Rows
from forebay.requests.step_plan import TierCopy
from forebay.runtime.host.disk_store import DiskStore
from forebay.runtime.host.tier_stores import LostRows

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
