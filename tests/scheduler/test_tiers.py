"""Tiers of the prefix cache behind the device: what is stored, loaded, and given up (C18, C19, C20)."""

from __future__ import annotations

import pytest

from forebay.base.errors import EngineError
from forebay.memory.miss_reason import MissReason
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan, TierCopy
from tests.kinds_of import kind_config
from tests.scheduler.rig import Rig

PROMPT = list(range(2000, 2034))  # 8 whole pages are cached of it
OTHER = list(range(5000, 5060))


def tiered(*, worth: int = 200, tiers=("host",), tier_pages: int = 64, **changes) -> Rig:
    """A page of 4 tokens has 400 bytes; a token is computed in the time in which `worth` bytes are copied."""
    kinds = kind_config(slot_bytes={"kv": 400}, recompute_bytes_per_token=worth)
    changes = {"num_pages": 15, "tiers": {name: {"kv": tier_pages} for name in tiers}, "kinds": kinds} | changes
    return Rig(**changes)


def evicted(rig: Rig) -> None:
    """Compute the prompt, and another one that takes its pages."""
    for prompt in (PROMPT, OTHER):
        rig.add(prompt, max_new=1)
        rig.run()


def fetches(rig: Rig) -> list[TierCopy]:
    return [copy for plan in rig.plans for copy in plan.host.fetches]


def report(rig: Rig, req: Request):
    (cache,) = [update.cache for update in rig.updates if update.request_id == req.id and update.cache]
    return cache


def load(rig: Rig) -> StepPlan:
    plan = rig.launch()
    while not (plan and plan.host.fetches):
        plan = rig.launch()
    return plan


def test_tiers_evicted_prefix_is_loaded_and_reported_by_tier():
    rig = tiered()
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    cache = report(rig, req)
    assert (cache.cached_tokens, cache.tiers, cache.miss_reason) == (32, {"host": 32}, MissReason.NONE)
    assert sum(len(copy.slots["kv"]) for copy in fetches(rig)) == 8
    again = rig.add(PROMPT, max_new=1)
    rig.run()
    assert (report(rig, again).cached_tokens, report(rig, again).tiers) == (32, {})
    assert rig.scheduler.state(0.0).counters["tier_loaded_tokens"] == 32


def test_tiers_store_each_page_once():
    rig = tiered()
    for _ in range(3):
        rig.add(PROMPT, max_new=1)
        rig.run()
    stores = [copy for plan in rig.plans for copy in plan.host.stores]
    assert [len(copy.slots["kv"]) for copy in stores] == [8]


def test_tiers_of_a_scheduler_are_none_by_default():
    rig = tiered(tiers=())
    evicted(rig)
    rig.add(PROMPT, max_new=1)
    rig.run()
    assert not any(plan.host.copies for plan in rig.plans)


@pytest.mark.parametrize("worth", [100, 99])
def test_tiers_prefix_that_is_computed_faster_is_not_loaded(worth):
    rig = tiered(worth=worth)
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    assert bool(fetches(rig)) == (worth == 100)
    assert (report(rig, req).miss_reason is MissReason.NOT_LOADED_IN_TIME) == (worth == 99)


def test_tiers_load_is_cut_into_slices_that_count_as_prompt_tokens():
    rig = tiered(chunked_prefill_size=6)
    evicted(rig)
    rig.add(PROMPT, max_new=1)
    rig.add([1, 2, 3, 4, 5, 6, 7], max_new=1)
    plan = load(rig)
    assert [len(copy.slots["kv"]) for copy in plan.host.fetches] == [3], "a page takes the time of two tokens"
    assert plan.num_tokens == 0
    rig.commit()
    rig.run()
    assert [len(copy.slots["kv"]) for copy in fetches(rig)] == [3, 3, 2]
    last = next(plan for plan in reversed(rig.plans) if plan.host.fetches)
    assert last.num_tokens == 2, "the last slice leaves two tokens of the step"


def test_tiers_store_that_fails_is_not_found_and_is_made_by_the_next_request():
    rig = tiered(tiers=("disk",))
    rig.add(PROMPT, max_new=1)
    rig.step()
    plan = rig.launch()
    assert plan is not None
    (copy,) = plan.host.stores
    rig.commit(lost=(copy.number,))
    (tier,) = rig.scheduler.memory.tiers.all
    assert (tier.cache.num_pages, tier.kv.num_free) == (0, tier.kv.capacity)
    rig.run()
    rig.add(PROMPT, max_new=1)
    rig.run()
    counters = rig.scheduler.state(0.0).counters
    assert (counters["tier_lost_stores"], counters["tier_stored_tokens"], tier.cache.num_pages) == (1, 32, 8)


def test_tiers_load_that_fails_is_not_tried_again():
    rig = tiered(tiers=("host", "disk"))
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    (copy,) = load(rig).host.fetches
    rig.commit(lost=(copy.number,))
    assert rig.scheduler.memory.tiers.all[0].cache.num_pages < 23, "what could not be read is gone from its tier"
    rig.run()
    assert fetches(rig) == [copy]
    assert (report(rig, req).cached_tokens, report(rig, req).miss_reason) == (0, MissReason.NOT_LOADED_IN_TIME)


def test_tiers_prefix_that_a_file_had_once_is_reported_as_evicted_from_it():
    rig = tiered(tiers=("disk",), tier_pages=15)
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    assert (report(rig, req).cached_tokens, report(rig, req).miss_reason) == (0, MissReason.EVICTED_FROM_DISK)


def test_tiers_prefix_that_a_file_never_had_is_evicted_from_the_device_alone():
    rig = tiered(tiers=("disk",), tier_pages=7)
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    assert (report(rig, req).cached_tokens, report(rig, req).miss_reason) == (0, MissReason.EVICTED)


@pytest.mark.parametrize("ends", ["abort", "fail"])
def test_tiers_load_in_flight_whose_request_or_step_ends_leaves_nothing_behind(ends):
    rig = tiered()
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    load(rig)
    if ends == "abort":
        rig.abort(req.id)
        rig.commit()
    else:
        rig.fail(EngineError("broken"))
    rig.run()
    rig.scheduler.audit()
    assert rig.free_pages + rig.scheduler.pools.cache.num_pages == 15


def test_tiers_flush_empties_them():
    rig = tiered()
    evicted(rig)
    rig.scheduler.flush_cache()
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    assert not fetches(rig)
    assert report(rig, req).miss_reason is MissReason.EMPTY


def test_tiers_flush_of_a_load_in_flight_keeps_nothing_of_it():
    rig = tiered()
    evicted(rig)
    req = rig.add(PROMPT, max_new=1)
    load(rig)
    rig.scheduler.flush_cache()
    rig.commit()
    rig.run()
    assert report(rig, req).cached_tokens == 0


def test_tiers_second_request_waits_for_the_load_of_the_first():
    rig = tiered()
    evicted(rig)
    reqs = [rig.add([*PROMPT, 9000 + i], max_new=1) for i in range(2)]
    rig.run()
    assert sum(len(copy.slots["kv"]) for copy in fetches(rig)) == 8
    assert [report(rig, req).cached_tokens for req in reqs] == [32, 32]


def test_tiers_prefix_is_loaded_or_computed_by_measured_rates():
    rig = tiered(worth=99)  # computing would be faster
    evicted(rig)
    rates = rig.scheduler.memory.tiers.rates
    rates.computed(100, 1.0)
    rates.loaded({"host": 1 << 20}, 1.0)
    assert rates.worth("host") == 10485
    assert rates.worth("disk") == 99
    req = rig.add(PROMPT, max_new=1)
    rig.run()
    assert fetches(rig)
    assert report(rig, req).tiers == {"host": 32}


def test_tiers_load_that_is_measured_as_slow_is_tried_again_later():
    rig = tiered(worth=200)
    evicted(rig)
    rates = rig.scheduler.memory.tiers.rates
    rates.computed(100, 1e-3)
    rates.loaded({"host": 1 << 20}, 1.0)
    tried = 0
    while not fetches(rig):
        req = rig.add(PROMPT, max_new=1)
        rig.run()
        rig.scheduler.pools.cache.flush()
        tried += 1
    assert tried > 10
    assert report(rig, req).miss_reason is MissReason.NONE


def test_tiers_step_is_measured_if_it_only_loads_or_only_computes_prompts():
    rig = tiered(worth=200)
    evicted(rig)
    tiers = rig.scheduler.memory.tiers
    rig.add(PROMPT, max_new=2)
    rig.run()
    (load_step,) = [plan for plan in rig.plans if plan.host.fetches]
    prompts = [plan for plan in rig.plans if plan.num_tokens >= 16 and not plan.host.fetches]
    decodes = [plan for plan in rig.plans if plan.num_decodes]
    for plan in (*decodes, load_step):
        tiers.measured(plan, 1.0)
    assert tiers.rates.worth("host") == 200, "3,200 bytes are too few to measure"
    tiers.rates.loaded({"host": 1 << 20, "disk": 1 << 20}, 1.0)
    tiers.rates.loaded({"host": 1 << 20}, 1.0)
    assert tiers.rates.worth("host") == 200, "no prompt was measured"
    tiers.measured(prompts[0], 1.0)
    assert tiers.rates.worth("host") == (1 << 20) // prompts[0].num_tokens


def test_c32_tiers_tenant_keeps_its_share_of_a_tier():
    rig = tiered(tier_pages=20, tenants={"a": 1, "b": 1}, num_pages=40)
    for i in range(12):
        rig.add([*range(1000 * i, 1000 * i + 17)], max_new=1, tenant="a" if i < 8 else "b")
        rig.run()
    (host,) = rig.scheduler.memory.tiers.all
    assert dict(host.cache.shares.held) == {"a": 8, "b": 12} or dict(host.cache.shares.held) == {"a": 10, "b": 10}
    again = rig.add([*range(11000, 11017)], max_new=1, tenant="b")
    rig.run()
    assert report(rig, again).cached_tokens == 16


def test_tiers_next_in_line_does_not_take_the_row_of_a_request_that_is_loading():
    """It would start without what the tier has of its own prompt."""
    rig = tiered(max_running_requests=1, num_pages=24)
    evicted(rig)
    other = [*range(7000, 7030)]
    for prompt in (other, OTHER, PROMPT[::-1] + OTHER[:20]):
        rig.add(prompt, max_new=1)
        rig.run()
    reqs = [rig.add(prompt, max_new=1) for prompt in (PROMPT, other)]
    rig.run()
    assert [report(rig, req).tiers for req in reqs] == [{"host": 32}, {"host": 28}]
