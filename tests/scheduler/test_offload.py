"""Retracted requests whose memory is offloaded to the host (C26)."""

import pytest

from forebay.base.errors import EngineError
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import as_ids
from forebay.requests.request import Status
from forebay.requests.step_plan import HostCopy
from forebay.scheduler.memory.host_copies import HostCopies
from forebay.scheduler.step_draft import StepDraft
from tests.kinds_of import kind_config
from tests.scheduler.rig import Rig

SLOT_BYTES = {"kv": 10, "window": 10, "state": 20}
SMALL = kind_config(slot_bytes={"kv": 1}, retraction_host_bytes=100, recompute_bytes_per_token=100)


def pressed(depth: int = 0, *, host_bytes: int = 1 << 20, worth: int = 100, **others) -> Rig:
    """Two requests of which only one can finish at a time."""
    kinds = kind_config(
        slot_bytes=SLOT_BYTES, retraction_host_bytes=host_bytes, recompute_bytes_per_token=worth, **others
    )
    rig = Rig(page_size=1, num_pages=16, schedule_conservativeness=0.01, depth=depth, overlap_depth=depth, kinds=kinds)
    rig.add(4, max_new=9)
    rig.add(4, max_new=9)
    return rig


def retract(rig: Rig):
    while not rig.scheduler.counters.get("retractions"):
        rig.step()
    return rig.reqs[2]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("slots", [0, 12])
def test_c26_what_was_offloaded_comes_back_and_nothing_is_computed_twice(depth, slots):
    rig = pressed(depth, num_slots=slots)
    req = retract(rig)
    rig.run()
    (save,) = [copy for plan in rig.plans for copy in plan.host.saves]
    (load,) = [copy for plan in rig.plans for copy in plan.host.loads]
    assert save.request_id == load.request_id == req.id
    assert len(save.slots["kv"]) == len(load.slots["kv"])
    assert len(save.slots.get("state", ())) == len(load.slots.get("state", ())) == (slots > 0)
    resumed = next(plan for plan in rig.plans if plan.host.loads)
    assert resumed.q_lens[0] == 1
    assert not slots or load.slots["state"] not in resumed.kinds.state.clears
    assert len(rig.tokens_of(req)) == 9
    assert rig.scheduler.counters["retractions_kept"] == 1
    assert rig.scheduler.memory.host_copies.num_bytes == 0


def test_c26_the_windows_that_are_still_read_come_back_too():
    rig = pressed(num_window_pages=120, window=5)
    retract(rig)
    rig.run()
    (save,) = [copy for plan in rig.plans for copy in plan.host.saves]
    (load,) = [copy for plan in rig.plans for copy in plan.host.loads]
    assert len(save.slots["window"]) == len(load.slots["window"]) == 4, "the next token reads four and itself"
    assert 0 not in load.slots["window"]


def test_what_ends_before_the_plan_that_copies_it_is_not_copied():
    offloaded = HostCopies(SMALL)
    draft = StepDraft(1, ReqToTokenPool(1, 4))
    assert offloaded.save(HostCopy(request_id=1, slots={"kv": as_ids([1, 2])}), 4, draft)
    offloaded.drop(1, draft)
    assert (draft.saves, draft.drops) == ([], [])
    assert offloaded.num_bytes == 0


def test_an_abort_of_the_one_that_stays_leaves_no_copy_behind():
    rig = pressed()
    while not rig.scheduler.counters.get("retractions"):
        if (plan := rig.launch()) and not plan.host.saves:
            rig.commit()
    rig.abort(1)
    rig.commit()
    rig.run()
    assert rig.scheduler.memory.host_copies.num_bytes == 0


@pytest.mark.parametrize(("host_bytes", "worth"), [(50, 100), (1 << 20, 9)])
def test_c26_without_room_or_where_copying_takes_longer_it_computes_again(host_bytes, worth):
    rig = pressed(host_bytes=host_bytes, worth=worth)
    req = retract(rig)
    rig.run()
    assert not any(plan.host.saves or plan.host.loads for plan in rig.plans)
    assert len(rig.tokens_of(req)) == 9


@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_request_drops_its_copy(depth):
    rig = pressed(depth)
    req = retract(rig)
    rig.step()
    assert req.status is Status.WAITING
    rig.abort(req.id)
    rig.run()
    planned = [copy.request_id for plan in rig.plans for copy in plan.host.saves]
    dropped = [id for plan in rig.plans for id in plan.host.drops]
    assert planned == dropped == [req.id]
    assert rig.scheduler.memory.host_copies.num_bytes == 0


def test_nobody_relies_on_a_copy_that_a_failed_step_was_to_make():
    rig = pressed()
    while not rig.scheduler.counters.get("retractions"):
        plan = rig.launch()
        if not plan.host.saves:
            rig.commit()
    req = rig.reqs[2]
    assert plan.host.saves
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("broken"))
    assert rig.scheduler.memory.host_copies.num_tokens(req.id) == 0
    rig.run()
    assert len(rig.tokens_of(req)) == 9
    assert not any(plan.host.loads for plan in rig.plans)


def test_a_drop_is_done_though_the_plan_that_was_to_do_it_never_came_to_be():
    offloaded = HostCopies(SMALL)
    rows = ReqToTokenPool(1, 4)
    offloaded.save(HostCopy(request_id=1, slots={"kv": as_ids([1, 2])}), 4, StepDraft(1, rows))
    draft = StepDraft(2, rows)
    offloaded.drop(1, draft)
    for _ in range(2):
        assert draft.drops == [1], "the first time something fails before the plan is whole"
        draft = StepDraft(2, rows, offloaded.start_over([draft], committed=1))
    assert offloaded.start_over([StepDraft(3, rows)], committed=2) == []
