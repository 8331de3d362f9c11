"""Steps on a thread of their own, so that the host plans, commits and streams while one runs.

A GPU's stream does that by itself. On a CPU the step's kernels would keep the thread that launches them: here they keep
another one, which leaves the interpreter's lock while they run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from forebay.requests.step_plan import CapturingRunner, Launched, StepPlan, StepResult


class StepBefore(Exception):
    """Raised for a step that was queued behind one that failed, and may rely on work that was not done."""


class OverlappedRunner:
    """A `Runner` over another one, whose steps run in the order of their launch.

    An error in a plan is raised by its step's `result`, and every step launched before the error was seen fails too. No
    other caller may use the inner runner any more.
    """

    def __init__(self, runner: CapturingRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._failures_seen = 0  # by whoever launches
        self._failed_at = -1  # the number seen when the plan was made that failed last

    def launch(self, plan: StepPlan) -> Launched:
        return _Launching(self, self._thread.submit(self._run, plan, self._failures_seen))

    def capture_next(self) -> bool:
        return self._thread.submit(self._runner.capture_next).result()

    def saw_failure(self) -> None:
        self._failures_seen += 1

    def _run(self, plan: StepPlan, failures_seen: int) -> Launched:
        if self._failed_at == failures_seen:
            raise StepBefore(f"step {plan.step} was launched behind one that failed")
        try:
            return self._runner.launch(plan)
        except Exception:
            self._failed_at = failures_seen
            raise


@dataclass(frozen=True, slots=True)
class _Launching:
    """A step that may not have begun."""

    runner: OverlappedRunner
    launched: Future[Launched]

    def result(self) -> StepResult:
        try:
            launched = self.launched.result()
        except StepBefore:
            raise
        except Exception:
            self.runner.saw_failure()
            raise
        return launched.result()
