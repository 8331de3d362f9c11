"""A scheduler at rest admits nothing, and goes on with what waits."""

from __future__ import annotations

from forebay.requests.request import Status
from forebay.scheduler.halt import Halt, Mode, resume, weights_changed
from tests.kinds_of import kind_config
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


def test_halt_is_done_once_the_memory_of_retracted_requests_is_on_the_host() -> None:
    kinds = kind_config(slot_bytes={"kv": 10}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=100)
    rig = Rig(page_size=1, kinds=kinds)
    req = rig.add(9, max_new=5)
    rig.step()
    rig.scheduler.preemption.suspend(req)
    halt = Halt(rig.scheduler, Mode.WAIT)
    assert not halt.done
    plan = halt.plan(rig.now)
    assert plan is not None
    assert [copy.request_id for copy in plan.host.saves] == [req.id]
    assert not halt.done, "its step is in flight"
    rig.flights.append(plan)
    rig.commit()
    assert halt.done
    resume(rig.scheduler, rig.now)
    rig.run()
    assert [copy.request_id for later in rig.plans for copy in later.host.loads] == [req.id]
    assert len(rig.tokens_of(req)) == 5


def test_request_restarted_with_other_weights_reports_the_cache_that_it_finds_then() -> None:
    rig, prompt = Rig(page_size=4), list(range(100, 109))
    rig.add(prompt, max_new=2)
    rig.run()
    req = rig.add(prompt, max_new=5)
    rig.step()
    halt = Halt(rig.scheduler, Mode.RETRACT)
    while not halt.done:
        if (plan := halt.plan(rig.now)) is not None:
            rig.flights.append(plan)
        if rig.flights:
            rig.commit()
    weights_changed(rig.scheduler, 1)
    resume(rig.scheduler, rig.now)
    rig.run()
    reports = [update.cache.cached_tokens for update in rig.updates if update.request_id == req.id and update.cache]
    assert reports == [8, 0]
    assert len(rig.tokens_of(req)) == 1 + 5, "the first one before it began again"
