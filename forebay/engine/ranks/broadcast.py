"""Rank 0's side of the log: each plan, and each other change of the device, reaches every rank in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forebay.base.errors import Conflict, EngineError
from forebay.engine.lifecycle.sleep import Memory
from forebay.engine.ranks.log import Capture, Entry, Keep, LogWriter, Release, Resume, Update, Void
from forebay.engine.ranks.outcome import Outcome, RankLost, Ranks
from forebay.memory.slots import Ids
from forebay.requests.step_plan import CapturingRunner, Launched, StepPlan, StepResult


class RankBroadcast:
    """A `Runner` that sends each plan to every rank, and then to the `runner` of rank 0.

    A step fails if it fails on any rank, and a sequence of a step if it fails on any rank. The caller executes plans in
    the order in which it launches them, from one thread; results may be awaited from another thread.
    """

    def __init__(self, runner: CapturingRunner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._log, self._lock = LogWriter(), threading.Lock()

    def launch(self, plan: StepPlan) -> Launched:
        """Start the step on every rank. Raises the error of rank 0's runner, after the other ranks have the void."""
        number = self._append(plan)
        try:
            return _OnAllRanks(self, plan.step, number, self._runner.launch(plan))
        except Exception:
            self.void(plan.step)
            raise

    def capture_next(self) -> bool:
        """Capture one more size on every rank; False if no rank has more."""
        number = self._append(Capture())
        more = self._runner.capture_next()
        outcomes = self._ranks.outcomes(number)
        if any(outcome.error or outcome.more != more for outcome in outcomes):
            self._ranks.lost(RankLost(f"log entry {number}: rank 0 captured a graph, other ranks: {[*outcomes]}"))
        return more

    def void(self, step: int) -> None:
        """Record for every rank that a step failed."""
        self._append(Void(step=step))

    def outcomes(self, number: int) -> Sequence[Outcome]:
        """Wait for the outcomes of a log entry on the other ranks."""
        return self._ranks.outcomes(number)

    def everywhere(self, entry: Entry, own: Callable[[], Any]) -> Any:
        """Carry out a change of the memory on every rank, and return what `own`, rank 0's part, returns. Raises its
        error if all ranks failed; if only some did, the ranks end."""
        number = self._append(entry, limited=False)
        error: Exception | None = None
        result = None
        try:
            result = own()
        except Exception as raised:
            error = raised
        outcomes = self._ranks.outcomes(number)
        if any(bool(outcome.error) != (error is not None) for outcome in outcomes):
            said = [str(error or "done"), *(outcome.error or "done" for outcome in outcomes)]
            self._ranks.lost(RankLost(f"{type(entry).__name__.lower()} by rank: {'; '.join(said)}"))
        if error is not None:
            raise error
        return result

    def _append(self, entry: Entry, *, limited: bool = True) -> int:
        with self._lock:
            number = self._log.written.num_entries
            self._ranks.send(self._log.record(entry), limited=limited)
            return number


@dataclass(frozen=True, slots=True)
class _OnAllRanks:
    """A step on its way on every rank."""

    broadcast: RankBroadcast
    step: int
    number: int
    own: Launched

    def result(self) -> StepResult:
        try:
            result = self.own.result()
        except Exception:
            self.broadcast.void(self.step)
            raise
        outcomes = self.broadcast.outcomes(self.number)
        if errors := [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes, 1) if outcome.error]:
            self.broadcast.void(self.step)
            raise EngineError(f"step {self.step} failed on {'; '.join(errors)}", code="step_failed")
        failed = {*result.failed}.union(*(outcome.failed for outcome in outcomes))
        return replace(result, failed=tuple(sorted(failed)), num_ranks=1 + len(outcomes))


class RankMemory(Memory):
    """The memory of all ranks. Each call is a log entry, and rank 0's own part of it is done by `own`."""

    def __init__(self, own: Memory, broadcast: RankBroadcast) -> None:
        self._own, self._everywhere = own, broadcast.everywhere

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of rank 0, by tag."""
        return self._own.num_bytes()

    def check(self, tags: Collection[str]) -> None:
        self._own.check(tags)

    def keep(self, places: Mapping[str, Ids]) -> int:
        num_bytes: int = self._everywhere(Keep(slots=dict(places)), lambda: self._own.keep(places))
        return num_bytes

    def release(self, tags: Collection[str]) -> None:
        self._everywhere(Release(tags=tuple(tags)), lambda: self._own.release(tags))

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        self._everywhere(Resume(tags=tuple(tags)), lambda: self._own.resume(tags, progress))

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        """Raises Conflict for weights from memory, which the other ranks do not have."""
        if path is None or given:
            raise Conflict("with --tp-size above 1 weights are updated from a checkpoint: save it first", code="ranks")
        self._everywhere(Update(path=path), lambda: self._own.update(path, given, progress))
