"""Sleep and wake, and weight updates: one engine's transitions, one at a time.

    serving -> draining -> asleep(tags) -> waking -> serving

An engine is asleep if it has released memory or is paused; requests wait meanwhile. No torch in here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from forebay.base.errors import Conflict, InvalidRequest, ModelError
from forebay.base.log import event, get_logger
from forebay.engine.frames import KV_CACHE, TAGS, WEIGHTS, Occupied, Release, Resume, ToEngine, UpdateWeights
from forebay.engine.lifecycle.contents import ContentsCheck
from forebay.engine.lifecycle.transitions import Transitions
from forebay.formats.identity import weights_digest
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import Ids
from forebay.scheduler.halt import Halt, Mode, forget_caches, keep_cached, resume, weights_changed
from forebay.scheduler.scheduler import Scheduler

RETRY_AFTER_S: Final = 5.0  # a wake that failed, for requests that wait

log = get_logger("engine")


class Phase(StrEnum):
    """The state of an engine, as clients see it: a transition is `draining` until its halt, and `waking` while memory
    is taken again."""

    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    WAKING = "waking"


class Memory(Protocol):
    """The memory of an engine, by tag. Nothing is in flight when it is called."""

    def num_bytes(self) -> dict[str, int]:
        """By tag."""
        ...

    def check(self, tags: Collection[str]) -> None:
        """Raise Conflict for a tag that cannot be released, or could not be had again."""
        ...

    def keep(self, places: Mapping[str, Ids]) -> int:
        """Copy what the caches have there to host memory, by kind of cache, until `kv_cache` is resumed, which puts it
        back, or weights change; its bytes."""
        ...

    def release(self, tags: Collection[str]) -> None:
        """Give the memory of these tags back to the operating system or the device; its content is lost."""

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        """Where anything is raised, all of them are released as before. `progress` is called with each tensor that is
        loaded."""
        ...

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        """Other weights, from a checkpoint and, by name, from memory. Where anything is raised the old ones are there;
        or, of a Conflict of code `weights_lost`, none. `progress` as of `resume`."""
        ...


class NoMemory(Memory):
    """The memory of an engine that has none."""

    def num_bytes(self) -> dict[str, int]:
        return {}

    def check(self, tags: Collection[str]) -> None: ...

    def keep(self, places: Mapping[str, Ids]) -> int:
        return 0

    def release(self, tags: Collection[str]) -> None: ...

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None: ...

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None: ...


class Sleeper:
    """The memory of an engine, released and resumed, and its weights. An `EngineCore` calls it while it is `away`: it
    plans by `transitions` instead of the scheduler, and calls `settle` after each turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Memory,
        clock: Callable[[], float] = time.monotonic,
        *,
        wake_on_request: bool = False,
        keep_prefix_cache: bool = False,
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self.transitions = Transitions(scheduler, clock)
        self._memory = memory
        self._wake_on_request = scheduler.handoff.wakes = wake_on_request
        self.keep_prefix_cache = keep_prefix_cache
        self.contents: ContentsCheck | None = None  # of the weights, if they are mapped from a file
        self.away = False  # from serving
        self.loaded_at = clock()  # a tensor, at last
        self._released: list[str] = []
        self._paused = self._waking = False
        self._retry_at = 0.0
        self._last_sleep_s = self._last_wake_s = 0.0
        self._kept_tokens = self._kept_bytes = 0  # of the prefix cache
        self._weights = ""  # the name of those that an update has loaded
        # Of a checkpoint, or of tensors from memory, and the version that it now is.
        self.on_update: Callable[[str | None, int], None] = lambda path, version: None
        # The memory of the weights has been taken or written again; calls what it is given with each tensor.
        self.on_weights: Callable[[Callable[[], None]], None] = lambda progress: None

    @property
    def resting(self) -> bool:
        """Nothing is planned until something is resumed."""
        return bool(self._released) or self._paused

    @property
    def has_weights(self) -> bool:
        """Whether the memory of the weights is there."""
        return WEIGHTS not in self._released

    @property
    def phase(self) -> Phase:
        """Return the phase that the engine reports."""
        if self.transitions.current is not None:
            return Phase.DRAINING
        return Phase.WAKING if self._waking else Phase.ASLEEP if self.resting else Phase.SERVING

    @property
    def state(self) -> Occupied:
        return Occupied(
            phase=self.phase,
            released=list(self._released),
            paused=self._paused,
            num_bytes=self._memory.num_bytes(),
            weight_version=self._scheduler.queues.weight_version,
            weights=self._weights,
            last_sleep_s=self._last_sleep_s,
            last_wake_s=self._last_wake_s,
            kept_tokens=self._kept_tokens,
            kept_bytes=self._kept_bytes,
        )

    # -- what the core turns ------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Continue the transition under way as far as possible. Call it whenever a step has completed, and while
        idle."""
        transition = self.transitions.current
        if transition is None:
            wakes = self._wake_on_request and not self._paused  # a pause ends by a command alone
            wanted = self._scheduler.queues.waiting or self._scheduler.queues.pending
            if self._released and wakes and wanted and now >= self._retry_at:
                self._wake_for_requests()
        elif transition.halt.done:
            self.transitions.end(lambda: transition.act(transition.began))
            self._restart()
        elif now >= transition.deadline:
            num, num_open = self._scheduler.queues.num_running, self._scheduler.handoff.tickets.num_open
            self.transitions.end(lambda: _raise(_too_long(num, num_open, now - transition.began)))
            self._restart()
        self.away = self.transitions.current is not None or self.resting

    def handle(self, frame: ToEngine) -> None:
        """Begin a transition; `take_answers` returns its result."""
        match frame:
            case Release():
                self.transitions.begin(
                    frame, lambda: self._check_release(frame.tags), lambda began: self._release(frame.tags, began)
                )
            case UpdateWeights():
                self.transitions.begin(frame, lambda: None, lambda began: self._update(frame.path, {}))
            case Resume():
                self.transitions.answer(frame.serial, lambda: self._resume(frame.tags))
        self.settle(self._clock())

    # -- for those in the same process --------------------------------------------------------------------------------

    def sleep(self, tags: Collection[str] = TAGS) -> None:
        """Release the memory at once, while nothing runs. Raises the error of a release that fails."""
        assert not self._scheduler.queues.num_running, "who is in the same process sleeps between its own calls"
        self._check_release(tags)
        halt = Halt(self._scheduler, Mode.WAIT)
        assert halt.done, "something is left of calls that have ended"
        self._release(tags, self._clock())
        self.away = True

    def wake(self, tags: Collection[str] = ()) -> None:
        """Map the memory of these tags again, () for all released ones. Raises the error of a wake that fails; the
        engine is then asleep as before."""
        self._resume(tags or tuple(self._released))

    def _wake_for_requests(self) -> None:
        """A failure is one line, and another try later."""
        try:
            self.wake()
        except Exception as error:
            self._retry_at = self._clock() + RETRY_AFTER_S
            log.error(event("wake_failed", reason=str(error), effect="asleep as before", retry_s=RETRY_AFTER_S))

    def update(self, path: str | None, given: Mapping[str, Any]) -> None:
        """Load other weights at once, while nothing runs. Raises the error of an update that fails."""
        Halt(self._scheduler, Mode.WAIT)
        try:
            self._update(path, given)
        finally:
            self._restart()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_release(self, tags: Collection[str]) -> None:
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise InvalidRequest(f"tags {unknown}: there are {', '.join(TAGS)}", param="tags")
        if again := sorted(set(tags) & set(self._released)):
            raise Conflict(f"{', '.join(again)}: released already", code="released")
        if not tags and self._paused:
            raise Conflict("generation is paused already", code="paused")
        self._memory.check(tags)

    def _release(self, tags: Collection[str], began: float) -> None:
        if not tags:
            self._paused = True
            return
        if KV_CACHE in tags:
            self._empty_caches()
        self._released += [tag for tag in TAGS if tag in tags]
        self._memory.release(tags)
        self._last_sleep_s = self._clock() - began
        kept = {"kept_tokens": self._kept_tokens, "kept_bytes": self._kept_bytes} if self._kept_tokens else {}
        log.info(event("asleep", released=",".join(tags), seconds=self._last_sleep_s, **kept))

    def _empty_caches(self) -> None:
        if self.keep_prefix_cache:
            try:
                places = keep_cached(self._scheduler, self._clock())
                self._kept_bytes = self._memory.keep(places)
                self._kept_tokens = len(places[KV]) * self._scheduler.pools.page_size
                return
            except (MemoryError, RuntimeError) as error:  # torch's, where there is no memory for the copies
                log.error(event("prefix_cache_not_kept", reason=str(error), effect="its prompts are computed again"))
        forget_caches(self._scheduler, self._clock())

    def _resume(self, tags: Collection[str]) -> None:
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise InvalidRequest(f"tags {unknown}: there are {', '.join(TAGS)}", param="tags")
        if self.transitions.current is not None:
            raise Conflict("another transition is under way: wait for its answer", code="in_transition")
        missing = sorted(set(tags) - set(self._released))
        if missing or not self.resting:
            raise Conflict(f"{', '.join(missing) or 'nothing'}: not released", code="not_released")
        began, self._waking = self._clock(), True
        try:
            self._memory.resume(tags, self._loaded)
            if WEIGHTS in tags:
                self.on_weights(self._loaded)
        finally:
            self._waking = False
        self._released = [tag for tag in self._released if tag not in tags]
        if KV_CACHE in tags:
            self._kept_tokens = self._kept_bytes = 0
        if tags:
            self._last_wake_s = self._clock() - began
            log.info(
                event("awake" if not self._released else "resumed", resumed=",".join(tags), seconds=self._last_wake_s)
            )
        else:
            self._paused = False
        self._restart()

    def _update(self, path: str | None, given: Mapping[str, Any]) -> None:
        try:
            self._memory.update(path, given, self._loaded)
        except Exception as error:
            if isinstance(error, Conflict) and error.code == "weights_lost":  # the old as well as the new ones
                self._released += [WEIGHTS] if WEIGHTS not in self._released else []
                self._memory.release([WEIGHTS])
            elif WEIGHTS not in self._released:  # the old ones serve on, and may have been read again
                self.on_weights(self._loaded)
            if isinstance(error, ModelError):  # the fault is in what was named
                raise InvalidRequest(error.message, code=error.code, param="model_path") from error
            raise
        self._released = [tag for tag in self._released if tag != WEIGHTS]
        self._weights = weights_digest(Path(path)) if path and not given else f"from memory {secrets.token_hex(8)}"
        self._kept_tokens = self._kept_bytes = 0
        weights_changed(self._scheduler, self._scheduler.queues.weight_version + 1)
        self.on_weights(self._loaded)
        self.on_update(path, self._scheduler.queues.weight_version)
        log.info(event("weights_updated", version=self._scheduler.queues.weight_version, path=path or "memory"))

    def _loaded(self) -> None:
        self.loaded_at = self._clock()

    def _restart(self) -> None:
        """Let requests run, unless memory is still released."""
        self.away = self.resting
        if not self.resting:
            resume(self._scheduler, self._clock())


def _too_long(num_running: int, num_open: int, seconds: float) -> Conflict:
    tickets = f", and {num_open} transfers are open," if num_open else ""
    return Conflict(
        f"{num_running} requests still run{tickets} after {seconds:.1f} s: give them longer (timeout_s), or "
        "retract or abort them (mode); everything goes on as before",
        code="drain_timeout",
    )


def _raise(error: Exception) -> None:
    raise error
