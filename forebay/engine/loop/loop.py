"""The engine process's loop: frames in, steps, frames out; asleep when there is nothing to do."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from forebay.base import fault
from forebay.base.clock import TICK_S, RunClock
from forebay.base.errors import Conflict, EngineError, ForebayError
from forebay.base.log import event, get_logger
from forebay.base.wake import Wake
from forebay.engine.channel import Channel, ChannelClosed, FrameTooLarge
from forebay.engine.frames import (
    TAGS,
    AbortRequest,
    AddEndTokens,
    AddRequest,
    Beat,
    Checked,
    CheckTransfers,
    FlushCache,
    GetReuse,
    GetState,
    GetTree,
    LoadAdapter,
    Release,
    Resume,
    SaveCache,
    Shutdown,
    ToEngine,
    UnloadAdapter,
    Updates,
    UpdateWeights,
)
from forebay.engine.loop.core import EngineCore, stop_check
from forebay.engine.loop.surveys import Surveys, of_cache
from forebay.engine.stream import failed
from forebay.requests.updates import Failure, Update

STATE_INTERVAL_S: Final = 1.0
LOG_INTERVAL_S: Final = 10.0  # of work
AUDIT_INTERVAL_S: Final = 10.0  # between two looks for leaked pages, which take an idle engine
IDLE_WORK_AFTER_S: Final = 0.3  # without anything to do: what comes next is then not held up by what could wait
RESTING_WAIT_S: Final = 0.25  # how soon to look again for requests that have waited too long while it is asleep
COMPILE_WAIT_S: Final = 0.001  # the same, for a grammar that is being compiled: most take no longer
STUCK_WAIT_S: Final = 0.02  # how soon to look again when those who wait cannot be served yet

_LOOKS: Final = (AbortRequest, AddEndTokens, GetState, GetTree)  # frames that leave a check of the cache alone

log = get_logger("engine")


class EngineLoop:
    """Turns an `EngineCore` by the frames of a channel. Borrows both."""

    def __init__(
        self,
        core: EngineCore,
        channel: Channel[ToEngine],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep_idle_s: float = 0.0,
    ) -> None:
        self._core = core
        self._sleep_idle_s = sleep_idle_s  # 0: it never sleeps by itself
        self._sleep_at: float | None = clock() + sleep_idle_s if sleep_idle_s else None
        self._channel = channel
        self._surveys = Surveys(core.scheduler.pools.cache, core.scheduler.pools.pictures)
        if core.exchange:
            channel.also_wake_for(core.exchange.transfers.fileno())
        if core.sleeper.contents is not None:
            channel.also_wake_for(core.sleeper.contents.fileno())
        self._files_read = Wake() if core.adapters else None
        if core.adapters and self._files_read:
            core.adapters.on_read = self._files_read.set
            channel.also_wake_for(self._files_read.fileno())
            weakref.finalize(self, self._files_read.close)
        self._clock = clock
        self._state_at = clock() + STATE_INTERVAL_S
        self._audit_at = clock() + AUDIT_INTERVAL_S
        self._phase: str = core.sleeper.phase  # that was told
        self._idle_work = True
        self._checked_last = False  # in the idle turn before: a check and a piece of idle work take turns
        self._turn_began: float | None = None  # None while it waits for frames
        self._flushes: list[int] = []  # serials of those who wait for their end
        self._saves: list[int] = []  # the same of writes to files
        self._shutdown = False

    def run(self, arrived: Sequence[ToEngine] = ()) -> None:
        """Serve until `Shutdown` or until the peer is gone. The frames that `arrived` while the model was loaded come
        first. Raises ChannelError for a peer that sends bytes that are no frame, and errors from which the core cannot
        recover."""
        try:
            if updates := [update for frame in arrived for update in self._handle(frame)]:
                self._send(updates)
            while not self._shutdown:
                self.turn()
        except ChannelClosed as error:
            log.info(event("peer_gone", reason=error.message))

    def turn(self) -> None:
        """One round: the frames that have arrived, one step, one `Updates` frame with all updates."""
        self._turn_began = None
        frames = self._channel.receive(self._patience_s())
        self._turn_began = self._clock()
        if self._is_sleep_due(any(isinstance(frame, AddRequest) for frame in frames)):
            stop_check(self._core)
            self._core.sleeper.handle(Release(serial=0, tags=list(TAGS)))
        updates: list[Update] = []
        if not all(isinstance(frame, _LOOKS) for frame in frames):
            stop_check(self._core)
        for frame in frames:
            fault.point("engine.receive")
            updates += self._handle(frame)
        updates += self._work(without_frames=not frames)
        if updates:
            self._send(updates)
        for batch in self._core.cache_events.take() if self._core.cache_events else ():
            self._channel.send(Updates(cache_events=batch))
        if (contents := self._core.sleeper.contents) is not None:
            contents.note(updates)
        self._answer()
        if self._phase != self._core.sleeper.phase:
            self._send_state(0)

    def _work(self, *, without_frames: bool) -> list[Update]:
        """Run one step, or without requests take the events of transfers and do idle work."""
        if not self._core.idle or self._core.checks.computing:
            updates = self._core.step()
            self._report()
            return updates
        updates = self._core.handle_transfers()
        if not without_frames:
            return updates
        began = self._clock()
        if self._idle_work and (self._checked_last or not self._is_check_due(began)):
            self._idle_work, self._checked_last = self._core.in_idle_time(), False
        elif not self._core.sleeper.away:
            self._checked_last = True
            self._core.stats.last_step_at = began  # the time without work is no delay
            self._core.checks.turn(began)
            self._core.stats.worked(self._clock() - began, for_check=True)
        return updates

    def _is_check_due(self, now: float) -> bool:
        """Return whether a check of the prefix cache is due, or under way."""
        return not self._core.sleeper.away and self._core.checks.wait_s(now, 0.0) == 0.0

    def _answer(self) -> None:
        """Send a state for each question whose work has ended."""
        core = self._core
        self._answer_about_cache()
        for serial, failure in core.sleeper.transitions.take_answers():
            self._send_state(serial, failure)
        if core.adapters and self._files_read:
            self._files_read.clear()
            core.adapters.advance()
            for serial, failure in core.adapters.take_answers():
                self._send_state(serial, failure)
        for serial, found in core.exchange.checks.take_answers() if core.exchange else ():
            refused, checked = (found, None) if isinstance(found, Failure) else (None, found)
            self._send_state(serial, refused, checked)

    def _flush_or_save(self, frame: FlushCache | SaveCache) -> None:
        """Begin to drop the prefix cache, or to write it to its files."""
        if isinstance(frame, SaveCache):
            self._saves.append(frame.serial)
            return
        self._core.scheduler.flush_cache()
        self._flushes.append(frame.serial)

    def _answer_about_cache(self) -> None:
        """Answer the questions whose flush has ended, or for which all that is stored can be written to files."""
        scheduler = self._core.scheduler
        if self._flushes and not scheduler.flushing:
            serials, self._flushes = self._flushes, []
            for serial in serials:
                self._send_state(serial)
        if self._saves and not scheduler.pools.draft.stores:
            serials, self._saves = self._saves, []
            refused = self._save()
            for serial in serials:
                self._send_state(serial, refused)

    def _save(self) -> Failure | None:
        """Write the prefix cache to its files; return why that failed."""
        try:
            if self._core.files is None:
                raise Conflict("this engine has no files: start it with --prefix-cache-dir", code="no_prefix_cache_dir")
            self._core.files.save()
        except (ForebayError, OSError) as error:
            return Failure.of(
                error if isinstance(error, ForebayError) else Conflict(f"the files: {error}", code="disk")
            )
        return None

    def start_beating(self, clock: RunClock) -> None:
        """The engine's sign of life, from a thread of its own until the channel is closed: `clock` is ticked and a
        `Beat` sent about every second. Native calls leave the interpreter's lock while they run, so not even the
        longest step is in its way."""

        def run() -> None:
            while True:
                time.sleep(TICK_S)
                clock.tick()
                try:
                    # A peer that is not reading is no reason to pile them up.
                    if not self._channel.num_unsent_bytes:
                        self._channel.send(self.beat())
                except ChannelClosed:
                    return

        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def beat(self) -> Beat:
        """Return the progress of the loop, for another thread. Each tensor that is loaded is a sign of life."""
        began = self._turn_began
        return Beat(
            turn_age_s=0.0 if began is None else max(0.0, self._clock() - max(began, self._core.sleeper.loaded_at)),
            step_age_s=self._core.step_age_s(),
            step_limit_s=self._core.step_limit_s,
        )

    def _patience_s(self) -> float | None:
        if self._core.checks.computing:
            return 0.0
        if self._core.idle:
            return self._idle_patience_s()
        if self._core.sleeper.resting:
            return RESTING_WAIT_S
        if self._core.scheduler.queues.constraints.unready and self._core.stuck:
            return COMPILE_WAIT_S
        return STUCK_WAIT_S if self._core.stuck else 0.0

    def _idle_patience_s(self) -> float | None:
        waits = [self._core.adapters.patience_s()] if self._core.adapters else []
        if self._idle_work or self._core.exchange:
            waits.append(IDLE_WORK_AFTER_S)
        elif self._sleep_at is not None:
            waits.append(max(0.0, self._sleep_at - self._clock()))
        if not self._core.sleeper.away:
            waits.append(self._core.checks.wait_s(self._clock(), IDLE_WORK_AFTER_S))
        return min((wait for wait in waits if wait is not None), default=None)

    def _is_sleep_due(self, disturbed: bool) -> bool:
        """Return True if no request came for `sleep_idle_s` seconds."""
        after_s, now = self._sleep_idle_s, self._clock()
        if not after_s or self._core.sleeper.resting:
            self._sleep_at = None
        elif disturbed or not self._core.idle or self._sleep_at is None:
            self._sleep_at = now + after_s
        if self._sleep_at is None or now < self._sleep_at:
            return False
        self._sleep_at = now + after_s  # for another try, if this one is refused
        return True

    def _handle(self, frame: ToEngine) -> list[Update]:
        match frame:
            case AddRequest():
                return self._core.add(frame)
            case AbortRequest():
                return self._core.abort(frame.request_id)
            case AddEndTokens():
                self._core.end_tokens.add(frame.token_ids)
            case FlushCache() | SaveCache():
                self._flush_or_save(frame)
            case GetState():
                self._send_state(frame.serial)
            case GetTree() | GetReuse():
                self._channel.send(of_cache(frame, self._surveys, self._core.scheduler, self._clock()))
            case Release() | Resume() | UpdateWeights():
                self._core.sleeper.handle(frame)
            case LoadAdapter() | UnloadAdapter() if self._core.adapters:
                self._core.adapters.handle(frame)
            case CheckTransfers() if self._core.exchange:
                self._core.exchange.checks.begin(frame, self._clock())
            case Shutdown():
                self._shutdown = True
            case _:
                log.warning(event("frame_ignored", type=type(frame).__name__))
        return []

    def _send(self, updates: list[Update]) -> None:
        """Send all updates in one frame, or in several if one would exceed the size limit."""
        fault.point("engine.send")
        try:
            self._channel.send(Updates.pack(updates))
        except FrameTooLarge as error:
            if len(updates) > 1:
                half = len(updates) // 2
                self._send(updates[:half])
                self._send(updates[half:])
                return
            request_id = updates[0].request_id
            log.error(event("update_too_large", id=request_id, reason=error.message))
            self._core.abort(request_id)
            too_large = EngineError(f"{error.message}: ask for fewer log-probabilities", code=error.code)
            self._channel.send(Updates(updates=[failed(request_id, too_large)]))

    def _send_state(self, serial: int, refused: Failure | None = None, checked: Checked | None = None) -> None:
        now, core = self._clock(), self._core
        self._state_at = now + STATE_INTERVAL_S
        self._surveys.note(now)
        memory = core.sleeper.state
        self._phase = memory.phase
        adapters = core.adapters.report if core.adapters else ()
        self._channel.send(
            core.stats.frame(
                core.scheduler,
                now,
                answers=serial,
                refused=refused,
                checked=checked,
                memory=memory,
                adapters=adapters,
            )
        )

    def _report(self) -> None:
        now = self._clock()
        if now >= self._state_at:
            self._send_state(0)
        rests = self._core.idle and not self._core.checks.computing
        if rests:
            self._surveys.note(now)
        if rests and now >= self._audit_at:
            self._audit_at = now + AUDIT_INTERVAL_S
            lost = self._core.scheduler.reclaim_leaks()
            if lost:
                log.error(event("pages_leaked", pages=lost, effect="quarantined until the next start"))
        if self._core.stats.worked_s() >= LOG_INTERVAL_S:
            log.info(self._core.stats.line(self._core.scheduler, now))
