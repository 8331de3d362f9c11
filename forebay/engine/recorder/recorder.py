"""The recorder of an engine: the records of its scheduler, in a buffer that outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from forebay.base.record_buffer import RecordBuffer
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.journal import Again, Beyond, Origin, Planned, Record
from forebay.scheduler.scheduler import Scheduler

WHOLE_EVERY: Final = 256  # steps: what was overwritten before is then not needed to read a plan


class Append(Protocol):
    """Writes a record, with another one `before` it at once. Raises ValueError if there is no room for them."""

    def __call__(self, record: bytes, before: bytes | None = None, /) -> None: ...


class Recorder:
    """A journal that encodes each record for `append`. A record that `append` refuses with ValueError is replaced by a
    short one.

    Inputs are appended before the scheduler acts on them. A plan is only compared with: it is appended together with
    the next record, so that a decode step appends twice. The last plan of an engine that dies is not recorded."""

    def __init__(self, append: Append) -> None:
        self._append, self._encode = append, msgspec.msgpack.Encoder().encode
        self._last: Planned | None = None
        self._plan: bytes | None = None  # that the next record is appended with

    def __call__(self, record: Record) -> None:
        """Append a record, unless it is a plan."""
        before, self._plan = self._plan, None
        if type(record) is Planned:
            if before is not None:
                self._alone(before)
            last, self._last = self._last, record
            is_alike = last is not None and _is_alike(last, record)
            self._plan = self._encode(Again(record.step, record.rest) if is_alike else record)
            return
        data = self._encode(record)
        try:
            self._append(data, before)
        except ValueError:
            if before is not None:
                self._alone(before)
            self._alone(data)

    def _alone(self, data: bytes) -> None:
        try:
            self._append(data)
        except ValueError:
            self._append(self._encode(Beyond(f"a record of {len(data)} bytes, which is longer than the recorder")))


def _is_alike(last: Planned, record: Planned) -> bool:
    return (
        not (record.num_extends or last.num_extends or record.admissions)
        and record.rows == last.rows
        and record.q_lens == last.q_lens
        and record.step % WHOLE_EVERY != 0
    )


def origin_of(scheduler: Scheduler) -> Origin:
    """Return the record of a scheduler that has had no request yet."""
    role, before = scheduler.handoff, []
    if scheduler.pools.adapters.accepting:
        before.append("adapters")
    if any(tier.cache.num_pages for tier in scheduler.memory.tiers.all):
        before.append("files of the prefix cache")
    return Origin(
        config=scheduler.config,
        instance=role.instance if isinstance(role, DecodeRole) else "",
        drafts=scheduler.proposer is not None,
        wakes=role.wakes,
        state=", ".join(before),
    )


def start(scheduler: Scheduler, buffer: RecordBuffer) -> None:
    """Record the inputs of a new scheduler into a buffer from now on."""
    buffer.keep(msgspec.msgpack.encode(origin_of(scheduler)))
    scheduler.queues.journal = Recorder(buffer.append)


def decode_all(data: Sequence[bytes]) -> list[Record]:
    """Return the records of their encodings, each plan whole. Plans whose sequences were overwritten have none. Raises
    msgspec.ValidationError for bytes that are no record."""
    decoder, last, records = msgspec.msgpack.Decoder(Record), Planned(-1), list[Record]()
    for each in data:
        record = decoder.decode(each)
        if isinstance(record, Again):
            record = msgspec.structs.replace(last, step=record.step, rest=record.rest)
        if isinstance(record, Planned):
            last = msgspec.structs.replace(record, admissions=())
        records.append(record)
    return records
