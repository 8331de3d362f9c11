"""After a failure whose books are wrong everything is free: a lost cache is better than a wrong one (C8, C27)."""

import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import KindConfig
from forebay.requests.updates import FinishReason
from tests.scheduler.rig import Rig

BOTH = KindConfig(num_slots=24, track_interval=4, anchor_interval=1000, num_window_pages=64, window=6)


@pytest.mark.parametrize("state", [KindConfig(), BOTH], ids=["plain", "hybrid"])
def test_wrong_books_are_cleared_and_everybody_still_gets_all_tokens(state: KindConfig) -> None:
    rig = Rig(kinds=state)
    reqs = [rig.add(9, max_new=4) for _ in range(3)]
    rig.step()
    plan = rig.launch()
    assert plan is not None
    nobody = 99
    rig.scheduler.held.kv.take_ids(1, nobody)
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("the step failed"))
    assert rig.scheduler.counters["books_cleared"] == 1
    assert rig.free_pages == rig.scheduler.held.kv.capacity
    rig.scheduler.audit()
    rig.run()
    assert [rig.finish_of(req) for req in reqs] == [FinishReason.LENGTH] * 3
    assert [len(rig.tokens_of(req)) for req in reqs] == [4] * 3
