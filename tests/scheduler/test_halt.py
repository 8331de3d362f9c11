"""A scheduler at rest admits nothing, and goes on with what waits."""

from __future__ import annotations

from forebay.requests.request import Status
from forebay.scheduler.halt import Halt, Mode, resume
from tests.scheduler.rig import Rig


def test_halted_scheduler_finishes_what_runs_and_admits_what_waits_once_it_goes_on() -> None:
    rig = Rig(page_size=4)
    running = rig.add(9, max_new=3)
    rig.step()
    waiting = rig.add(9, max_new=3)
    halt = Halt(rig.scheduler, Mode.WAIT)
    while (plan := rig.step()) or rig.flights:
        assert plan is None or plan.num_extends == 0
    assert halt.done
    assert len(rig.tokens_of(running)) == 3
    assert waiting.status is Status.WAITING
    resume(rig.scheduler, rig.now)
    rig.run()
    assert len(rig.tokens_of(waiting)) == 3
