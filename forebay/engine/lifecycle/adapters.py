"""Adapters that come and go while an engine serves. No torch in here.

A thread reads and checks an adapter's files, and brings the tensors into the form that steps read. Between steps, the
loop then copies them into a slot that no step references, a few at a time."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from forebay.base import fault
from forebay.base.errors import Conflict, EngineError, ForebayError, InvalidRequest, ModelError
from forebay.base.log import event, get_logger
from forebay.engine.frames import LoadAdapter, LoadedAdapter, UnloadAdapter
from forebay.formats.store import hold
from forebay.memory.adapters import AdapterLoad
from forebay.requests.updates import Failure
from forebay.scheduler.recovery import end_requests_of
from forebay.scheduler.scheduler import Scheduler

COPY_S: Final = 0.001  # between two steps

log = get_logger("engine")

Answer = tuple[int, Failure | None]


class ReadAdapter(Protocol):
    """An adapter that was read, in the form in which slots hold it."""

    @property
    def rank(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> str: ...


class AdapterMemory(Protocol):
    """The slots of the weights."""

    def read(self, path: str) -> ReadAdapter:
        """Read, check and pack the files at `path`, in any thread. Raises ModelError."""
        ...

    def write(self, slot: int, files: ReadAdapter) -> Iterator[None]:
        """Write what `read` returned into a slot, a pair of tensors between two yields."""
        ...

    def holds(self, slot: int) -> bool:
        """Return whether there is anything in the slot: not after the memory of the weights was taken or written
        again."""
        ...


@dataclass(slots=True)
class _Load:
    """A load under way: the thread puts the tensors that it has read into `found`, the loop moves them to `files`, and
    `copying` copies them into the slot, None before that."""

    adapter: AdapterLoad
    serial: int
    found: SimpleQueue[ReadAdapter | BaseException]
    began: float
    files: ReadAdapter | None = None
    copying: Iterator[None] | None = None


@dataclass(slots=True)
class _Unload:
    """An unload that waits until the slot of its adapter is free."""

    adapter: AdapterLoad
    serial: int
    deadline: float


class AdapterLoader:
    """Loads and unloads the adapters of a scheduler: `handle` begins, `go_on` between two steps does the rest,
    `take_answers` says what came of it. An error here ends no request, except those of an adapter
    that is lost. Slots are written only while `is_there` says that their memory is there."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: AdapterMemory,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_there: Callable[[], bool] = lambda: True,
        beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._scheduler, self._memory, self._clock = scheduler, memory, clock
        self._is_there, self.beside = is_there, beside or in_a_thread
        self.on_read: Callable[[], None] = lambda: None  # a thread has read something: `advance` has work
        self._adapters = scheduler.pools.adapters
        self._loads: list[_Load] = []
        self._unloads: list[_Unload] = []
        self._answers: list[Answer] = []

    @property
    def busy(self) -> bool:
        """Whether something is being loaded or waits for requests to end."""
        return bool(self._loads or self._unloads)

    def patience_s(self) -> float | None:
        """Return how long `advance` can wait if no step runs and `on_read` is not called; None for any time."""
        if self._is_there() and any(self._can_continue(load) for load in self._loads):
            return 0.0
        now = self._clock()
        return min((max(0.0, unload.deadline - now) for unload in self._unloads), default=None)

    def _can_continue(self, load: _Load) -> bool:
        if load.files is None:
            return not load.found.empty()
        return self._adapters.is_slot_free(load.adapter)

    @property
    def report(self) -> list[LoadedAdapter]:
        """Return the adapters that requests may name."""
        return [
            LoadedAdapter(
                name=adapter.name,
                number=adapter.number,
                path=adapter.path,
                rank=adapter.rank,
                num_bytes=adapter.num_bytes,
                num_users=adapter.num_users,
                digest=adapter.digest,
            )
            for adapter in self._adapters
        ]

    def take_answers(self) -> list[Answer]:
        """Return the serials of the loads and unloads that have ended, each with its error if it failed."""
        answers, self._answers = self._answers, []
        return answers

    def handle(self, frame: LoadAdapter | UnloadAdapter) -> None:
        """Begin a load or an unload."""
        try:
            if isinstance(frame, LoadAdapter):
                self._begin(frame)
            else:
                self._unload(frame)
        except ForebayError as error:
            self._answer(frame.serial, error)
        self.advance()

    def _unload(self, frame: UnloadAdapter) -> None:
        """Unload an adapter, and give up a load of that name, whose thread never touches the slot."""
        given_up = [load for load in self._loads if load.adapter.name == frame.name]
        for load in given_up:
            self._loads.remove(load)
            self._adapters.failed(load.adapter)
            why = f"the adapter {frame.name!a} was unloaded while it was being loaded"
            self._answer(load.serial, Conflict(why, code="adapter_unloaded"))
        is_loaded = frame.name in {adapter.name for adapter in self._adapters}
        draining = [adapter for adapter in self._adapters.draining if adapter.name == frame.name]
        if is_loaded or not (given_up or draining):
            adapter = self._adapters.unload(frame.name)
            log.info(event("adapter_unloading", name=adapter.name, number=adapter.number, users=adapter.num_users))
        elif draining:
            adapter = draining[-1]  # it was unloaded before: wait for its requests as well
        else:
            self._answer(frame.serial, None)
            return
        self._unloads.append(_Unload(adapter, frame.serial, self._clock() + frame.timeout_s))

    def load_now(self, name: str, path: str) -> None:
        """Load an adapter at once, while nothing runs. Raises ModelError and Conflict."""
        if not self._is_there():
            raise Conflict("the weights are released: wake the engine first", code="asleep")
        adapter = self._adapters.begin(name, path)
        try:
            files = self._memory.read(path)
            for _ in self._memory.write(adapter.slot, files):
                pass
        except BaseException:
            self._adapters.failed(adapter)
            raise
        self._loaded(adapter, files, 0.0)

    def unload_now(self, name: str) -> None:
        """Unload an adapter; its slot is free when its last request has ended. Raises NotFound."""
        self._adapters.unload(name)

    def read_again(self, progress: Callable[[], None]) -> None:
        """Write adapters whose slots hold nothing, as the memory of the weights is new; loads under way begin again.
        An adapter whose files are gone, or hold something else, is dropped, and its requests end with `adapter_lost`.
        `progress` is called with each file and each pair of tensors."""
        for load in self._loads:
            if load.copying and load.files and not self._memory.holds(load.adapter.slot):
                load.copying = self._memory.write(load.adapter.slot, load.files)
        for adapter in self._adapters.in_slots():
            if self._memory.holds(adapter.slot):
                continue
            try:
                files = self._memory.read(adapter.path)
                if files.digest != adapter.digest:
                    raise ModelError(f"{adapter.path}: its tensors are others than those that were loaded")
                progress()
                for _ in self._memory.write(adapter.slot, files):
                    progress()
            except Exception as error:
                self._drop(adapter, error)

    def _drop(self, adapter: AdapterLoad, error: Exception) -> None:
        log.error(event("adapter_lost", name=adapter.name, users=adapter.num_users, reason=str(error)))
        if not adapter.retired:
            self._adapters.unload(adapter.name)
        lost = Failure.of(
            Conflict(f"the adapter {adapter.name!a} could not be read again: {error}", code="adapter_lost")
        )
        end_requests_of(self._scheduler.queues, self._scheduler.outputs, adapter.number, lost)

    # -- between steps ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do a part of the work under way: one load after the other."""
        until = self._clock() + COPY_S
        for load in list(self._loads) if self._is_there() else ():
            try:
                if not self._continue(load, until):
                    continue
                self._loads.remove(load)
            except Exception as error:
                self._loads.remove(load)
                self._adapters.failed(load.adapter)
                self._answer(load.serial, error)
            if self._clock() >= until:
                break
        now = self._clock()
        for unload in list(self._unloads):
            is_free = unload.adapter not in self._adapters.draining
            if is_free or now >= unload.deadline:
                self._unloads.remove(unload)
                self._answer(unload.serial, None if is_free else _draining(unload.adapter))

    def _begin(self, frame: LoadAdapter) -> None:
        adapter = self._adapters.begin(frame.name, frame.path, replace=frame.replace)
        found: SimpleQueue[ReadAdapter | BaseException] = SimpleQueue()

        def read() -> None:
            try:
                found.put(self._memory.read(frame.path))
            except BaseException as error:  # whatever it is, the loop says so
                found.put(error)
            self.on_read()

        self._loads.append(_Load(adapter, frame.serial, found, self._clock()))
        try:
            self.beside(read)
        except Exception as error:  # no thread could be started
            found.put(error)

    def _continue(self, load: _Load, until: float) -> bool:
        """Return whether the load is complete. Raises the error of a load that fails. Files are read before a slot is
        taken, so that no adapter is retired for a load that fails."""
        if load.files is None:
            try:
                found = load.found.get_nowait()
            except Empty:
                return False
            if isinstance(found, BaseException):
                raise found if isinstance(found, Exception) else EngineError(f"{type(found).__name__}: {found}")
            load.files = found
        if load.copying is None:
            if not self._adapters.take_slot(load.adapter):
                return False
            load.copying = self._memory.write(load.adapter.slot, load.files)
        for _ in load.copying:
            fault.point("engine.copy_adapter")
            if self._clock() >= until:
                return False
        self._loaded(load.adapter, load.files, self._clock() - load.began)
        self._answer(load.serial, None)
        return True

    def _loaded(self, adapter: AdapterLoad, files: ReadAdapter, seconds: float) -> None:
        adapter.rank, adapter.num_bytes, adapter.digest = files.rank, files.num_bytes, files.digest
        with suppress(OSError):  # it was read, and is gone already
            weakref.finalize(adapter, os.close, hold(Path(adapter.path)))
        self._adapters.loaded(adapter)
        log.info(
            event(
                "adapter_loaded",
                name=adapter.name,
                number=adapter.number,
                slot=adapter.slot,
                rank=adapter.rank,
                seconds=seconds,
            )
        )

    def _answer(self, serial: int, error: BaseException | None) -> None:
        failure = None
        if error is not None:
            typed = error if isinstance(error, ForebayError) else EngineError(f"{type(error).__name__}: {error}")
            if isinstance(typed, ModelError):  # the fault is in what was named
                typed = InvalidRequest(typed.message, code="invalid_adapter", param="lora_path")
            log.info(event("adapter_refused", reason=typed.message))
            failure = Failure.of(typed)
        self._answers.append((serial, failure))


def in_a_thread(work: Callable[[], None]) -> None:
    """Run work beside the loop."""
    threading.Thread(target=work, name="adapter", daemon=True).start()


def _draining(adapter: AdapterLoad) -> Conflict:
    return Conflict(
        f"the adapter {adapter.name!a} takes no more requests, and {adapter.num_users} still use its slot: it is free "
        "when they end",
        code="adapter_draining",
    )
