"""The recorder of an engine: the records of its scheduler, in a buffer that outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from forebay.base.record_buffer import RecordBuffer
from forebay.base.units import human_bytes
from forebay.engine.recorder.mark import Marks, NoMark, NotAtRest
from forebay.memory.adapters import AdapterChanged, Change
from forebay.memory.slots import Ids
from forebay.requests.step_plan import StepPlan
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.journal import Again, Beyond, Marked, Origin, Planned, Reclaimed, Record, Unmarked, checksum_of
from forebay.scheduler.scheduler import Scheduler

MARKS: Final = 4  # in a full buffer, of a scheduler that rests often enough
WHOLE_EVERY: Final = 256  # steps: what was overwritten before is then not needed to read a plan


class Append(Protocol):
    """Writes a record, with another one `before` it at once. Raises ValueError if there is no room for them."""

    def __call__(self, record: bytes, before: bytes | None = None, /) -> None: ...


class Recorder:
    """A journal that encodes each record for `append`. A record that `append` refuses with ValueError is replaced by a
    short one.

    Inputs are appended before the scheduler acts on them. A plan is only compared with: it is appended together with
    the next record, so that a decode step appends twice. The last plan of an engine that dies is not recorded.

    With `marks`, the state of an idle scheduler is appended at its next audit, once `every_bytes` were appended since
    the last state: a replay can begin there. If a state cannot be kept, or has more than `most_bytes`, the reason is
    appended."""

    def __init__(self, append: Append, marks: Marks | None = None, every_bytes: int = 0, most_bytes: int = 0) -> None:
        self._append, self._encode = append, msgspec.msgpack.Encoder().encode
        self._marks, self._every_bytes, self._most_bytes = marks, every_bytes, most_bytes
        self._num_bytes = 0  # since the last mark
        self._step = 0
        self._decodes: tuple[Ids, bytes] | None = None  # rows and lengths of the last plan, if it had no prompts
        self._plan: bytes | None = None  # that the next record is appended with

    def __call__(self, record: Record | StepPlan) -> None:
        """Append a record, unless it is a plan."""
        before = self._plan
        if type(record) is StepPlan:
            if before is not None:
                self._alone(before)
            self._plan = self._planned(record)
            return
        if type(record) is Reclaimed:
            self._mark()
        self._plan = None
        data = self._encode(record)
        self._num_bytes += len(data)
        try:
            self._append(data, before)
        except ValueError:
            if before is not None:
                self._alone(before)
            self._alone(data)

    def _planned(self, plan: StepPlan) -> bytes:
        """Return the record of a plan, a short one if it has the decodes of the last one alone."""
        self._step = plan.step
        last, self._decodes = self._decodes, None
        if plan.num_extends:
            return self._encode(Planned.of(plan))
        rows, q_lens = self._decodes = plan.rows, plan.q_lens.tobytes()
        is_alike = last is not None and q_lens == last[1] and _is_same(rows, last[0])
        if is_alike and not plan.admissions and plan.step % WHOLE_EVERY:
            return self._encode(Again(plan.step, checksum_of(plan)))
        return self._encode(Planned.of(plan))

    def _mark(self) -> None:
        if self._marks is None or self._num_bytes < self._every_bytes:
            return
        try:
            state = self._marks.take()
        except NotAtRest:
            return
        except NoMark as error:
            state, why = b"", str(error)
        else:
            why = f"it takes {human_bytes(len(state))}" if len(state) > self._most_bytes else ""
        self._num_bytes = 0
        self._alone(self._encode(Unmarked(self._step, why) if why else Marked(self._step, state)))

    def _alone(self, data: bytes) -> None:
        try:
            self._append(data)
        except ValueError:
            self._append(self._encode(Beyond(f"a record of {len(data)} bytes, which is longer than the recorder")))


def _is_same(rows: Ids, others: Ids) -> bool:
    return rows is others or rows.tobytes() == others.tobytes()


def origin_of(scheduler: Scheduler) -> Origin:
    """Return the record of a scheduler that has had no request yet."""
    role, before = scheduler.handoff, ""
    if any(tier.cache.num_pages for tier in scheduler.memory.tiers.all):
        before = "files of the prefix cache"
    return Origin(
        config=scheduler.config,
        instance=role.instance if isinstance(role, DecodeRole) else "",
        drafts=scheduler.proposer is not None,
        wakes=role.wakes,
        state=before,
    )


def start(scheduler: Scheduler, buffer: RecordBuffer) -> None:
    """Record the inputs of a new scheduler into a buffer from now on, and before them the adapters that it has."""
    buffer.keep(msgspec.msgpack.encode(origin_of(scheduler)))
    journal = Recorder(buffer.append, Marks(scheduler), *[buffer.num_bytes // MARKS] * 2)
    for adapter in sorted(scheduler.pools.adapters.accepting, key=lambda adapter: adapter.number):
        journal(AdapterChanged(Change.BEGIN, adapter.name))
        journal(AdapterChanged(Change.LOADED, adapter.name, digest=adapter.digest))
    scheduler.queues.journal = journal.__call__  # a bound method takes less time than an object that is callable


def decode_all(data: Sequence[bytes]) -> list[Record]:
    """Return the records of their encodings, each plan whole. Plans whose sequences were overwritten have none. Raises
    msgspec.ValidationError for bytes that are no record."""
    decoder, last, records = msgspec.msgpack.Decoder(Record), Planned(-1), list[Record]()
    for each in data:
        record = decoder.decode(each)
        if isinstance(record, Again):
            record = msgspec.structs.replace(last, step=record.step, checksum=record.checksum)
        if isinstance(record, Planned):
            last = msgspec.structs.replace(record, admissions=())
        records.append(record)
    return records
