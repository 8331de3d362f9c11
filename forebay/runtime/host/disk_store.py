"""A tier of the prefix cache in files: written behind by a thread, read and checked when a plan asks for rows."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.formats import prefix_files
from forebay.formats.prefix_files import Identity, Record, Segment, Unreadable, Writer
from forebay.formats.prefix_files import Rows as RowsOfRecord
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import Ids
from forebay.memory.tier import Prefix
from forebay.pools.mover import Mover, Rows, checksums
from forebay.requests.step_plan import TierCopy
from forebay.runtime.host.tier_stores import LostRows

_MOST_QUEUED_BYTES: Final = 1 << 30  # of rows that are not written yet; a copy on top of it fails
_READ_AT_ONCE: Final = 8 << 20  # bytes
_SUM_BYTES: Final = 16  # of a record's header for each row, at most
_MOST_FILES: Final = 1 << 16  # open ones that this process asks for
_NO_COPY: Final = -1  # number of what is written without being a copy

log = get_logger("engine")


Slot = tuple[str, int]
"""A kind of cache, and the number of a slot."""


class _Place(NamedTuple):
    segment: Segment
    offset: int
    checksum: int


class _Queued(NamedTuple):
    """Rows to write. If a segment may have to be removed for them, `retained` are the slots whose rows have to stay."""

    copy: TierCopy
    rows: Rows
    written: torch.cuda.Event | None
    retained: Collection[Slot] = frozenset()

    @property
    def num_bytes(self) -> int:
        """The bytes that are written, at most."""
        num_rows = sum(len(part) for part in self.rows.values())
        return sum(part.nbytes for part in self.rows.values()) + len(self.copy.record) + (num_rows + 4) * _SUM_BYTES


class DiskStore:
    """Rows by kind of cache and slot, in the segments of a folder.

    If another process writes the folder, or writing has failed, this store only reads. The oldest segments are removed
    if all have more than `limit_bytes`, or if half of the files that this process may open are segments. Their rows are
    lost, but for those of slots that `retained` returns, which are written again.
    """

    def __init__(self, mover: Mover, folder: Path, identity: Identity, *, limit_bytes: int) -> None:
        self._mover, self._folder, self._identity, self._limit_bytes = mover, folder, identity, limit_bytes
        self._places: dict[Slot, _Place] = {}
        self._latest: dict[Slot, int] = {}  # number of the copy that a slot had last
        self._segments: list[Segment] = []
        self._most_segments = _raise_file_limit() // 2
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.failure = ""
        self.retained: Callable[[], Collection[Slot]] = frozenset
        self._lock = self._locked()
        self._writer = Writer(folder, identity) if self.writes else None
        self._thread = threading.Thread(target=self._run, name="prefix-files", daemon=True)
        self._thread.start()

    def _locked(self) -> int | None:
        try:
            prefix_files.folder_secret(self._folder)
            descriptor = prefix_files.lock(self._folder)
        except (ConfigError, OSError) as error:
            self._fail("prefix_cache_unusable", str(error))
            return None
        if descriptor is None:
            reason = f"{prefix_files.writer_of(self._folder)} writes it"
            log.warning(event("prefix_cache_read_only", path=self._folder, reason=reason))
        return descriptor

    @property
    def writes(self) -> bool:
        """Whether rows are written: the folder is this process's, and no write has failed."""
        return self._lock is not None and not self.failure

    def _fail(self, what: str, why: str) -> None:
        self.failure = why
        log.error(event(what, path=self._folder, reason=why, effect="nothing is stored there until a restart"))

    # -- what is there at the start -----------------------------------------------------------------------------------

    def records(self) -> Iterator[tuple[Record, Callable[[Mapping[str, Ids]], None]]]:
        """Yield the records of all segments that this engine can use, the oldest first. Each comes with the function to
        call with the slots that its rows get."""
        paths = prefix_files.paths(self._folder) if self._lock is not None or not self.failure else []
        too_many = f"{2 * self._most_segments} open files are allowed (ulimit -Hn)"
        ignored = {too_many: paths[: -self._most_segments]}  # by reason
        for path in paths[-self._most_segments :]:
            try:
                segment, identity = prefix_files.open_segment(path)
            except Unreadable as error:
                ignored.setdefault(str(error), []).append(path)
                continue
            self._segments.append(segment)
            if differs := prefix_files.difference(identity, self._identity):
                ignored.setdefault(differs, []).append(path)
                continue
            for begin, record in segment.records():
                if all(rows.row_bytes == self._mover.row_bytes.get(kind) for kind, rows in record.kinds.items()):
                    yield record, self._placer(segment, begin, record)
            if segment.ended is not None:
                log.warning(event("prefix_segment_cut", path=path, reason=str(segment.ended)))
        for reason, which in ignored.items():
            if which:
                log.warning(event("prefix_segment_ignored", path=which[0], segments=len(which), reason=reason))

    def _placer(self, segment: Segment, begin: int, record: Record) -> Callable[[Mapping[str, Ids]], None]:
        def place(slots: Mapping[str, Ids]) -> None:
            with self._changed:
                self._place(segment, begin, record, slots, 0)

        return place

    def _place(self, segment: Segment, begin: int, record: Record, slots: Mapping[str, Ids], copy: int) -> None:
        """Note where the rows of a record are, but for slots that a later copy than this one has got since."""
        for kind, number, at, checksum in record.places:
            slot = kind, int(slots[kind][number])
            if self._latest.get(slot, 0) == copy:
                self._places[slot] = _Place(segment, begin + at, checksum)

    # -- storing ------------------------------------------------------------------------------------------------------

    def store(self, copy: TierCopy, rows: Rows) -> None:
        """Queue rows for the writing thread. Raises LostRows if too many are queued, or if this process only reads."""
        queued = _Queued(copy, rows, self._mover.copied())
        with self._changed:
            for slot in _slots(copy):
                self._latest[slot] = copy.number
                self._places.pop(slot, None)
            if not self.writes or self._queued_bytes + queued.num_bytes > _MOST_QUEUED_BYTES:
                raise LostRows(f"{self._queued_bytes} bytes are to be written before")
        self._put(queued)

    def forget(self, prefix: Prefix, first: int) -> None:
        """Write a record that drops the last page of a prefix, number `first`, and all behind it from those before."""
        encoded = msgspec.msgpack.encode(Record(prefix.namespace, prefix.tenant, prefix.key, first, {}))
        self._put(_Queued(TierCopy(number=_NO_COPY, tier="", slots={}, there={}, record=encoded), {}, None))

    def _put(self, queued: _Queued) -> None:
        with self._changed:
            if not self.writes:
                return
            if self._may_remove(queued.num_bytes):
                queued = queued._replace(retained=self.retained())
            self._queue.append(queued)
            self._queued_bytes += queued.num_bytes
            self._changed.notify_all()

    def _may_remove(self, num_bytes: int) -> bool:
        """Return whether a segment may have to be removed when `num_bytes` more are written."""
        writes = self._writer.segment if self._writer is not None else None
        begins = writes is None or writes.num_bytes + self._queued_bytes >= prefix_files.SEGMENT_BYTES
        is_full = self._num_bytes + self._queued_bytes + num_bytes > self._limit_bytes
        return begins and (is_full or len(self._segments) >= self._most_segments)

    @property
    def _num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                queued = self._queue[0]
            try:
                if self.writes:
                    self._write(queued)
            except Exception as error:  # of any kind: a thread that has ended would let fetches wait for ever
                reason = error.strerror if isinstance(error, OSError) else None
                self._fail("prefix_cache_write_failed", reason or f"{type(error).__name__}: {error}")
            with self._changed:
                self._queue.popleft()
                self._queued_bytes -= queued.num_bytes
                self._changed.notify_all()

    def _write(self, queued: _Queued) -> None:
        assert self._writer is not None, "this process does not write"
        copy, rows, written, _ = queued
        if written is not None:
            written.synchronize()
        record = self._with_sums(copy, rows)
        parts = [_bytes(rows[kind]) for kind in record.kinds]
        before = self._writer.segment
        segment, begin = self._append(record, parts)
        with self._changed:
            self._place(segment, begin, record, copy.there, copy.number)
        if record.drops:
            self._writer.sync()
        if segment is not before:
            self._make_room(queued.retained)

    def _append(self, record: Record, parts: Sequence[memoryview]) -> tuple[Segment, int]:
        """Write a record; its segment, and the place of its rows there."""
        assert self._writer is not None, "this process does not write"
        before = self._writer.segment
        segment, begin = self._writer.append(record, parts)
        if segment is not before:
            with self._changed:
                self._segments.append(segment)
        return segment, begin

    def _with_sums(self, copy: TierCopy, rows: Rows) -> Record:
        record = msgspec.msgpack.decode(copy.record, type=Record)
        kinds = {
            kind: RowsOfRecord(named.ends, self._mover.row_bytes[kind], checksums(rows[kind]))
            for kind, named in record.kinds.items()
        }
        return msgspec.structs.replace(record, kinds=kinds)

    def _make_room(self, retained: Collection[Slot]) -> None:
        """Remove the oldest segments, each once what is retained of it has been written again."""
        for gone in self._segments[:-1]:
            if self._num_bytes <= self._limit_bytes and len(self._segments) <= self._most_segments:
                return
            if retained:
                self._write_again(gone, retained)
            with self._changed:
                self._segments.remove(gone)
                self._places = {slot: place for slot, place in self._places.items() if place.segment is not gone}
                with contextlib.suppress(OSError):
                    gone.path.unlink()
                os.close(gone.descriptor)

    def _write_again(self, gone: Segment, retained: Collection[Slot]) -> None:
        """Append those records of a segment of which rows are retained, up to the last one of these."""
        with self._changed:
            slots = {place.offset: slot for slot, place in self._places.items() if place.segment is gone}
        if not any(slot in retained for slot in slots.values()):
            return
        for begin, record in gone.records():
            ends = [
                record.kinds[kind].ends[number]
                for kind, number, at, _ in record.places
                if slots.get(begin + at) in retained
            ]
            if ends:
                self._write_head(gone, begin, record, max(ends), slots)

    def _write_head(self, gone: Segment, begin: int, record: Record, stop: int, slots: Mapping[int, Slot]) -> None:
        """Append a record up to its page number `stop`. `slots` has those of its rows by place in the segment."""
        head, parts, moved = _head(record, stop), list[memoryview](), list[tuple[int, int]]()
        first = to = 0
        for kind, rows in record.kinds.items():
            count, width = len(head.kinds[kind].sums), rows.row_bytes
            part = memoryview(bytearray(count * width))
            gone.read(begin + first, len(part), part)
            parts.append(part)
            moved += [(begin + first + number * width, to + number * width) for number in range(count)]
            first, to = first + len(rows.sums) * width, to + len(part)
        segment, again = self._append(head, parts)
        with self._changed:
            for before, after in moved:
                slot = slots.get(before)
                place = self._places.get(slot) if slot is not None else None
                if slot is not None and place is not None and (place.segment, place.offset) == (gone, before):
                    self._places[slot] = _Place(segment, again + after, place.checksum)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def fetch(self, copy: TierCopy) -> dict[str, Tensor]:
        """Return the rows of the slots, each compared with its checksum. Waits for rows that are being written."""
        with self._changed:
            numbers = {self._latest.get(slot, 0) for slot in _slots(copy)}
            self._changed.wait_for(lambda: not any(queued.copy.number in numbers for queued in self._queue))
            try:
                found = {kind: [self._places[kind, slot] for slot in ids.tolist()] for kind, ids in copy.there.items()}
            except KeyError as error:
                raise LostRows("a row was never written, or its segment was removed") from error
            try:
                return {kind: self._read(kind, places) for kind, places in found.items()}
            except Unreadable as error:
                log.warning(event("prefix_rows_lost", path=self._folder, reason=str(error)))
                raise LostRows(str(error)) from error

    def _read(self, kind: str, places: list[_Place]) -> Tensor:
        width = self._mover.row_bytes[kind]
        rows = torch.empty((len(places), width), dtype=torch.uint8)
        memory = _bytes(rows)
        at = 0
        while at < len(places):
            segment, offset, _ = places[at]
            stop = at + 1
            while (
                stop < len(places)
                and places[stop].segment is segment
                and places[stop].offset == offset + (stop - at) * width
                and (stop - at) * width < _READ_AT_ONCE
            ):
                stop += 1
            segment.read(offset, (stop - at) * width, memory[at * width : stop * width])
            at = stop
        for place, checksum in zip(places, checksums(rows), strict=True):
            if checksum != place.checksum:
                raise Unreadable(f"a row of {kind} in {place.segment.path.name} is damaged: its checksum differs")
        return rows

    # -- the end ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all that was stored is on the disk. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)
            if self._writer is not None and self.writes:
                self._writer.sync()

    def close(self) -> None:
        """Write what is queued, and give up the folder."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._writer is not None:
            self._writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _raise_file_limit() -> int:
    """Raise the number of files that this process may open, each segment being one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def _head(record: Record, stop: int) -> Record:
    """Return a record of the rows up to the end of page number `stop`."""
    page_bytes = len(record.tokens) // (record.start + len(record.kinds[KV].ends))
    counts = {kind: sum(end <= stop for end in rows.ends) for kind, rows in record.kinds.items()}  # ends ascend
    kinds = {
        kind: RowsOfRecord(rows.ends[: counts[kind]], rows.row_bytes, rows.sums[: counts[kind]])
        for kind, rows in record.kinds.items()
    }
    tokens, start = record.tokens[: stop * page_bytes], min(record.start, stop)
    return msgspec.structs.replace(record, tokens=tokens, start=start, kinds=kinds)


def _bytes(rows: Tensor) -> memoryview:
    """Return the bytes of rows, which may be none."""
    flat: npt.NDArray[np.uint8] = rows.numpy().reshape(-1)
    return flat.data


def _slots(copy: TierCopy) -> list[Slot]:
    """Return the slots of the tier, by kind of cache."""
    return [(kind, slot) for kind, ids in copy.there.items() for slot in ids.tolist()]
