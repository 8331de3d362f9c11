"""Kept prefixes in the tiers behind the device: evicted last there, within the same limits (C8, C19, C32)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.errors import EngineError
from forebay.memory.retention import RetentionRequest
from forebay.requests.request import Request
from forebay.scheduler.halt import weights_changed
from tests.kinds_of import kind_config
from tests.scheduler.rig import Rig

PROMPT = [*range(17)]
KEPT = 16
KINDS = {
    "pages": {},
    "states": {"num_slots": 40},
    "windows": {"num_window_pages": 80, "window": 8},
    "both": {"num_slots": 40, "num_window_pages": 80, "window": 8},
}


def tiered(what: str = "pages", *, tiers: tuple[str, ...] = ("host",), fraction: float = 0.5, **changes: Any) -> Rig:
    """A tier has 24 pages of 4 tokens, 4 states and 12 windows; a copy is always faster than computing."""
    kinds = kind_config(slot_bytes={"kv": 400}, recompute_bytes_per_token=1 << 20, **KINDS[what])
    slots = {"kv": 24, "state": 4, "window": 12}
    own = {name: {kind: slots[kind] for kind in ("kv", *kinds.num_slots)} for name in tiers}
    return Rig(
        **{
            "num_pages": 32,
            "max_running_requests": 2,
            "tiers": own,
            "kinds": kinds,
            "pinned_cache_fraction": fraction,
            **changes,
        }
    )


def ask(rig: Rig, prompt: list[int], *asked: RetentionRequest, **more: Any) -> Request:
    req = rig.add(prompt, max_new=2, retentions=asked, **more)
    rig.run()
    return req


def fill(rig: Rig, num: int = 12) -> None:
    """Requests of others, which take all memory of the tier one after another."""
    for i in range(num):
        rig.add([10_000 + 100 * i + j for j in range(17)], max_new=1)
        rig.run()


def tier_of(rig: Rig) -> Any:
    return rig.scheduler.memory.tiers.all[-1]


def loaded(rig: Rig, prompt: list[int] = PROMPT) -> int:
    """Return how many tokens come from a tier once the device has nothing."""
    rig.scheduler.pools.cache.flush()
    req = rig.add([*prompt, 5000], max_new=1)
    rig.run()
    (report,) = [each.cache for each in rig.updates if each.request_id == req.id and each.cache]
    return sum(report.tiers.values())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("what", KINDS)
def test_kept_prefix_is_evicted_last_in_a_tier_with_what_it_needs(what: str, depth: int) -> None:
    rig = tiered(what, depth=depth)
    ask(rig, PROMPT, RetentionRequest(17, 300.0))
    assert tier_of(rig).cache.retention.num_pages == KEPT // 4
    fill(rig)
    assert loaded(rig) == KEPT


@pytest.mark.parametrize("what", KINDS)
def test_prefix_that_nobody_wants_kept_is_evicted_from_a_tier(what: str) -> None:
    rig = tiered(what)
    ask(rig, PROMPT)
    fill(rig)
    assert loaded(rig) == 0


def test_kept_prefix_is_kept_in_each_tier_and_ends_there_at_its_time() -> None:
    rig = tiered(tiers=("host", "disk"))
    ask(rig, PROMPT, RetentionRequest(17, 300.0))
    tiers = rig.scheduler.memory.tiers.all
    assert [[each.until for each in tier.cache.retention] for tier in tiers] == [[300.0], [300.0]]
    rig.now = 300.0
    rig.add(3, max_new=1)
    rig.run()
    assert [[*tier.cache.retention] for tier in tiers] == [[], []]
    fill(rig)
    assert loaded(rig) == 0


def test_prefix_that_a_tier_has_already_is_kept_there_from_the_request_on() -> None:
    rig = tiered()
    ask(rig, PROMPT)
    ask(rig, PROMPT, RetentionRequest(17, 300.0))
    assert sum(len(plan.host.stores) for plan in rig.plans) == 1
    assert tier_of(rig).cache.retention.num_pages == KEPT // 4


@pytest.mark.parametrize("from_tier", [False, True])
def test_hit_extends_the_time_in_a_tier_wherever_it_is_read(from_tier: bool) -> None:
    rig = tiered()
    ask(rig, PROMPT, RetentionRequest(17, 300.0))
    rig.now = 200.0
    if from_tier:
        rig.scheduler.pools.cache.flush()
    req = rig.add([*PROMPT, 77], max_new=1, arrival=200.0)
    rig.run()
    (report,) = [each.cache for each in rig.updates if each.request_id == req.id and each.cache]
    assert (report.cached_tokens, bool(report.tiers)) == (KEPT, from_tier)
    assert [each.until for each in tier_of(rig).cache.retention] == [500.0]


def test_hit_in_front_of_the_end_of_a_kept_prefix_extends_nothing_in_a_tier() -> None:
    rig = tiered()
    ask(rig, PROMPT, RetentionRequest(17, 300.0))
    rig.now = 200.0
    rig.add([*PROMPT[:9], 77], max_new=1, arrival=200.0)
    rig.run()
    assert [each.until for each in tier_of(rig).cache.retention] == [300.0]


def test_flush_and_other_weights_end_what_a_tier_keeps() -> None:
    for ends in (lambda rig: rig.scheduler.flush_cache(), lambda rig: weights_changed(rig.scheduler, 1)):
        rig = tiered()
        ask(rig, PROMPT, RetentionRequest(17, 300.0))
        ends(rig)
        assert not [*tier_of(rig).cache.retention]


def test_c32_tenant_keeps_its_share_of_a_tier_and_no_more() -> None:
    rig = tiered(fraction=0.5, num_pages=64, tenants={"a": 1, "b": 1})
    for i in range(3):
        ask(rig, [1000 * i + j for j in range(17)], RetentionRequest(17, 300.0), tenant="a")
    held = tier_of(rig).cache.retention.held["pages"]
    assert dict(+held) == {"a": 4}
    assert tier_of(rig).cache.retention.limit("a") == 24 // 2 // 3


def test_kept_prefixes_of_a_tier_are_given_up_if_nothing_else_is_left_and_counted() -> None:
    rig = tiered(fraction=1.0, num_pages=64)
    for i in range(9):
        ask(rig, [1000 * i + j for j in range(17)], RetentionRequest(17, 300.0))
    assert rig.scheduler.state(0.0).counters["tier_prefixes_given_up"] >= 3
    assert loaded(rig, [8000 + j for j in range(17)]) == KEPT


def test_store_that_no_step_makes_keeps_nothing_until_the_prompt_is_computed_again() -> None:
    rig = tiered()
    for prompt in (PROMPT, [50, 51]):  # the failure of a step of two ends none of them
        rig.add(prompt, max_new=4, retentions=[RetentionRequest(17, 300.0)])
    rig.step()
    assert rig.launch().host.stores
    rig.fail(EngineError("a step failed"))
    assert not [*tier_of(rig).cache.retention]
    rig.run()
    assert tier_of(rig).cache.retention.num_pages == KEPT // 4
