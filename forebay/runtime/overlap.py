"""Steps on a thread of their own, so that the host plans, commits and streams while one runs.

A GPU's stream does that by itself. On a CPU the step's kernels would keep the thread that launches them: here they keep
another one, which leaves the interpreter's lock while they run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from forebay.requests.step_plan import Launched, StepPlan, StepResult
from forebay.runtime.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Launching:
    """A step that may not have begun."""

    launched: Future[Launched]

    def result(self) -> StepResult:
        return self.launched.result().result()


class OverlappedRunner:
    """A `Runner` over another one, whose steps run in the order of their launch. What is wrong with a plan is raised by
    its step's `result`. Nobody else may use the inner runner any more."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def launch(self, plan: StepPlan) -> Launched:
        return _Launching(self._thread.submit(self._runner.launch, plan))

    def capture_next(self) -> bool:
        return self._thread.submit(self._runner.capture_next).result()
