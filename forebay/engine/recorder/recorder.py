"""The recorder of an engine: the records of its scheduler, in a buffer that outlives the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from forebay.base.record_buffer import RecordBuffer
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.journal import Again, Beyond, Origin, Planned, Record
from forebay.scheduler.scheduler import Scheduler

WHOLE_EVERY: Final = 256  # steps: what was overwritten before is then not needed to read a plan


class Recorder:
    """A journal that encodes each record for `append`. A record that `append` refuses with ValueError is replaced by a
    short one."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append, self._encode = append, msgspec.msgpack.Encoder().encode
        self._last: Planned | None = None

    def __call__(self, record: Record) -> None:
        """Append a record."""
        if type(record) is Planned:
            last, self._last = self._last, record
            if last is not None and _is_alike(last, record):
                self._append(self._encode(Again(record.step, record.rest)))
                return
        data = self._encode(record)
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
