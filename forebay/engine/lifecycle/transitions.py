"""The transition of an engine that is under way: a halt of the scheduler, and an action once nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from forebay.base.errors import Conflict, EngineError, ForebayError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.engine.frames import Release, UpdateWeights
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Failure
from forebay.scheduler.halt import Halt, Mode
from forebay.scheduler.scheduler import Scheduler

log = get_logger("engine")


@dataclass(slots=True)
class Transition:
    """A transition under way: the action at the halt, the serial of its frame (0: none), and its deadline."""

    act: Callable[[float], None]
    serial: int
    halt: Halt
    deadline: float
    began: float


class Transitions:
    """The transition of one engine that is under way, at most one, and the answers to the frames that asked for one."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self.current: Transition | None = None
        self._answers: list[tuple[int, Failure | None]] = []

    def take_answers(self) -> list[tuple[int, Failure | None]]:
        """Return the serials of the transitions that have ended, each with its error if it failed."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def draining(self) -> bool:
        return self.current is not None

    def plan(self, now: float, width: int, mixed_limit: int) -> StepPlan | None:
        """Return the next step before the halt, or None if no transition is under way or nothing is left to run."""
        return None if self.current is None else self.current.halt.plan(now, width, mixed_limit)

    def end(self, act: Callable[[], None]) -> None:
        """End the current transition by `act`, and answer its frame."""
        assert self.current is not None, "no transition is under way"
        serial, self.current = self.current.serial, None
        self.answer(serial, act)

    def begin(self, frame: Release | UpdateWeights, check: Callable[[], None], act: Callable[[float], None]) -> None:
        """Begin a transition: `check` raises what forbids it, `act` is called once the scheduler has halted. A failure
        is the answer to the frame."""

        def begin() -> None:
            if self.current is not None:
                raise Conflict("another transition is under way: wait for its answer", code="in_transition")
            if frame.mode not in list(Mode):
                raise InvalidRequest(f"mode {frame.mode!r}: use {', '.join(Mode)}", param="mode")
            check()
            now = self._clock()
            halt = Halt(self._scheduler, Mode(frame.mode))
            self.current = Transition(act, frame.serial, halt, now + frame.timeout_s, now)

        try:
            begin()
        except ForebayError as error:
            self.answer(frame.serial, partial(_raise, error))

    def answer(self, serial: int, act: Callable[[], None]) -> None:
        """Call `act`; the error that it raises, or none, is the answer to the frame `serial`."""
        failure = None
        try:
            act()
        except Exception as error:
            typed = error if isinstance(error, ForebayError) else EngineError(f"{type(error).__name__}: {error}")
            log.error(event("transition_failed", reason=typed.message))
            failure = Failure.of(typed)
        if serial:
            self._answers.append((serial, failure))


def _raise(error: Exception) -> None:
    raise error
