"""A rank other than 0: it executes the log, and decides nothing."""

from __future__ import annotations

from collections import deque

from forebay.base.log import event, get_logger
from forebay.engine.lifecycle.sleep import Memory
from forebay.engine.ranks.log import Capture, Entry, Keep, LogReader, Release, Resume, Update, Void
from forebay.engine.ranks.outcome import DONE, Outcome
from forebay.requests.step_plan import CapturingRunner, Launched, StepPlan

log = get_logger("engine")


class Follower:
    """The log of one rank, executed with its `runner` and its `memory`. It has no clock and retries nothing.

    `take` starts the next entry, `land` ends the oldest one that has been started. Between them steps may be in flight,
    in as many as the device takes.
    """

    def __init__(self, rank: int, runner: CapturingRunner, memory: Memory) -> None:
        self._log, self._runner, self._memory = LogReader(rank), runner, memory
        self._started: deque[Launched | Outcome] = deque()
        self._num_landed = 0

    @property
    def num_started(self) -> int:
        """The number of entries that were started and have not ended."""
        return len(self._started)

    @property
    def digest(self) -> bytes:
        """Return the digest of the entries so far."""
        return self._log.read.digest

    def take(self, record: bytes) -> None:
        """Start the entry of the next record. Raises LogBroken for a record that does not continue the log."""
        entry = self._log.entry(record)
        if isinstance(entry, StepPlan):
            try:
                self._started.append(self._runner.launch(entry))
            except Exception as error:
                self._started.append(_failed(error))
        elif isinstance(entry, Void):
            log.info(event("step_void", step=entry.step))
            self._started.append(DONE)
        else:
            outcome = self._after_steps(entry)
            self._started.append(outcome)

    def land(self) -> tuple[int, Outcome]:
        """End the oldest entry; return its number and its outcome."""
        number, self._num_landed = self._num_landed, self._num_landed + 1
        started = self._started.popleft()
        return number, started if isinstance(started, Outcome) else _of_step(started)

    def _after_steps(self, entry: Entry) -> Outcome:
        """Change something else than a step does, once the steps in flight have ended."""
        self._started = deque(each if isinstance(each, Outcome) else _of_step(each) for each in self._started)
        try:
            return Outcome(more=self._change(entry))
        except Exception as error:
            return _failed(error)

    def _change(self, entry: Entry) -> bool:
        """Carry out an entry that is no step; return whether there is more to capture."""
        match entry:
            case Capture():
                return self._runner.capture_next()
            case Keep(slots=slots):
                self._memory.keep(slots)
            case Release(tags=tags):
                self._memory.release(tags)
            case Resume(tags=tags):
                self._memory.resume(tags, _nothing)
            case Update(path=path):
                self._memory.update(path, {}, _nothing)
        return False


def _nothing() -> None: ...


def _of_step(launched: Launched) -> Outcome:
    try:
        return Outcome(failed=launched.result().failed)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Outcome:
    log.error(event("rank_failed"), exc_info=error)
    return Outcome(error=f"{type(error).__name__}: {error}")
