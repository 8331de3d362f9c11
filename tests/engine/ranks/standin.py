"""A rank's process without a model: `python -P -m tests.engine.ranks.standin`, as `RankProcesses` starts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.config.engine_config import EngineConfig
from forebay.engine.lifecycle.sleep import Memory, NoMemory
from forebay.engine.loop.rank import main
from forebay.requests.step_plan import CapturingRunner, StepPlan, StepResult

ENTRY: Final = ("-P", "-m", "tests.engine.ranks.standin")
WEIGHT_BYTES: Final = 4321
FAILS: Final = 13  # the step that fails here


class Step:
    """A step of which rank 0 has the tokens."""

    def result(self) -> StepResult:
        return StepResult(token_ids=[])


class Runner:
    def launch(self, plan: StepPlan) -> Step:
        if plan.step == FAILS:
            raise RuntimeError("no room")
        return Step()

    def capture_next(self) -> bool:
        return False


def build(
    config: EngineConfig, rank: int, exchange: int, processes: Sequence[int]
) -> tuple[CapturingRunner, Memory, int]:
    assert len(processes) == config.ranks.size
    return Runner(), NoMemory(), WEIGHT_BYTES


if __name__ == "__main__":
    main(build)
