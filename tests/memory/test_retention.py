"""Prefixes that clients want kept: evicted last, until their time, within a part of each pool (C8, C19, C32)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.memory.retention import NotKept, Retained
from tests.memory.test_radix_kinds import ALICE, Rig, key

TALK = list(range(100, 112))
OTHER = list(range(200, 212))


class Keeping(Rig):
    """A cache of which half of each pool may be retained. `at` is the time of the clock that the scheduler has."""

    def __init__(self, most: float = 0.5, **more: Any) -> None:
        super().__init__(**more, most_retained=most)
        self.at = 0.0

    def keep(self, tokens: list[int], ttl_s: float = 60.0, tenant: str = "", num: int | None = None) -> Any:
        match = self.match(tokens[: num or len(tokens)])
        return self.cache.retain(match, tenant, ttl_s, self.at)

    def later(self, seconds: float) -> None:
        self.at += seconds
        self.cache.retention.expire(self.at)

    def use(self, tokens: list[int]) -> None:
        self.cache.unpin(self.cache.pin(self.match(tokens), at=self.at))

    def found(self, tokens: list[int]) -> int:
        return self.match(tokens).num_tokens


def rig_of(what: str, **more: Any) -> Keeping:
    """A cache of pages alone, with states or with windows of 5 tokens; 60 pages, 12 states."""
    sizes: dict[str, Any] = {"num_slots": 12 if what == "states" else 0, "window": 5 if what == "windows" else 0}
    return Keeping(**{"num_pages": 60, **sizes, **more})


KINDS = ["pages", "states", "windows"]


def insert(rig: Keeping, tokens: list[int], **who: Any) -> None:
    rig.insert(tokens, *([len(tokens)] if rig.states else []), **who)


@pytest.mark.parametrize("what", KINDS)
def test_retained_prefix_is_evicted_last(what: str) -> None:
    rig = rig_of(what)
    insert(rig, TALK)
    insert(rig, OTHER)
    assert isinstance(rig.keep(TALK), Retained)
    rig.use(OTHER)  # later than TALK
    assert rig.cache.evict(12) == 12
    assert (rig.found(TALK), rig.found(OTHER)) == (12, 0)
    rig.check()


@pytest.mark.parametrize("what", ["states", "windows"])
def test_retained_prefix_keeps_what_a_request_needs_to_resume(what: str) -> None:
    rig = rig_of(what)
    insert(rig, TALK)
    insert(rig, OTHER)
    rig.keep(TALK)
    rig.use(OTHER)
    part: Any = rig.states if what == "states" else rig.windows.in_tree
    part.evict(1 if what == "states" else 19)
    assert (rig.found(TALK), rig.found(OTHER)) == (12, 0)
    rig.check()


def test_retained_state_stays_although_a_later_one_shadows_it() -> None:
    rig = rig_of("states")
    rig.insert(TALK[:6], 6)
    assert isinstance(rig.keep(TALK, num=6), Retained)
    rig.insert(TALK, 12)
    rig.states.evict(1)
    assert rig.found(TALK) == 6
    rig.check()


@pytest.mark.parametrize("what", KINDS)
def test_retention_under_pressure_ends_for_the_prefix_whose_time_ends_first(what: str) -> None:
    rig = rig_of(what)
    for tokens, ttl_s in ((TALK, 60.0), (OTHER, 30.0)):
        insert(rig, tokens)
        assert isinstance(rig.keep(tokens, ttl_s), Retained)
    part: Any = rig.states if what == "states" else rig.windows.in_tree if what == "windows" else rig.cache
    part.evict({"pages": 1, "states": 1, "windows": 17}[what])  # of 24 windows 8 are retained
    assert rig.found(TALK) == 12
    assert rig.found(OTHER) < 12
    assert rig.cache.retention.num_given_up == 1
    rig.check()


@pytest.mark.parametrize("what", KINDS)
def test_everything_retained_can_be_evicted(what: str) -> None:
    rig = rig_of(what)
    for tokens in (TALK, OTHER):
        insert(rig, tokens)
        rig.keep(tokens)
    assert rig.cache.num_evictable == 24
    assert rig.cache.evict(24) == 24
    assert rig.cache.retention.num_pages == 0
    rig.check()


def test_retention_of_a_prefix_that_a_request_reads_is_not_given_up_for_pages() -> None:
    rig = rig_of("pages")
    for tokens, ttl_s in ((TALK, 30.0), (OTHER, 60.0)):
        insert(rig, tokens)
        rig.keep(tokens, ttl_s)
    pin = rig.cache.pin(rig.match(TALK))
    assert rig.cache.evict(24) == 12
    assert rig.cache.retention.num_given_up == 1
    assert rig.cache.retention.of(rig.match(TALK).node) is not None
    rig.cache.unpin(pin)
    rig.check()


def test_retention_of_a_prefix_that_another_one_continues_is_given_up_behind_that() -> None:
    rig = rig_of("pages")
    insert(rig, TALK)
    rig.keep(TALK, 30.0, num=4)
    rig.keep(TALK, 60.0)
    assert rig.cache.evict(2) == 2
    assert (rig.cache.retention.num_given_up, rig.cache.retention.num_pages) == (1, 4)
    assert rig.cache.evict(8) == 8
    assert (rig.found(TALK), rig.cache.retention.num_given_up) == (2, 2)
    rig.check()


def test_retention_ends_at_its_time() -> None:
    rig = rig_of("pages")
    insert(rig, TALK)
    insert(rig, OTHER)
    rig.keep(TALK, 60.0)
    rig.use(OTHER)
    rig.later(59.9)
    assert rig.cache.retention.num_pages == 12
    rig.later(0.1)
    assert rig.cache.retention.num_pages == 0
    rig.cache.evict(12)
    assert (rig.found(TALK), rig.found(OTHER)) == (0, 12)
    rig.check()


def test_hit_extends_the_retention_by_its_own_time() -> None:
    rig = rig_of("pages")
    insert(rig, TALK)
    rig.keep(TALK, 60.0)
    rig.later(50.0)
    rig.use([*TALK, 1, 2])
    rig.later(59.0)
    assert rig.cache.retention.num_pages == 12
    rig.later(1.0)
    assert rig.cache.retention.num_pages == 0


def test_hit_extends_the_longest_retained_prefix_of_its_path_alone() -> None:
    rig = rig_of("pages")
    insert(rig, TALK)
    rig.keep(TALK, num=4)
    rig.keep(TALK, num=8)
    rig.later(50.0)
    rig.use(TALK)
    rig.later(20.0)
    assert rig.cache.retention.num_pages == 8
    assert rig.cache.retention.of(rig.match(TALK[:4]).node) is None
    rig.check()


def test_retention_longer_than_before_replaces_it_and_a_shorter_one_extends_it() -> None:
    rig = rig_of("pages")
    insert(rig, TALK)
    rig.keep(TALK, 60.0)
    assert rig.keep(TALK, 100.0).until == 100.0
    rig.later(10.0)
    assert rig.keep(TALK, 60.0).until == 110.0
    rig.check()


def test_flush_ends_every_retention() -> None:
    rig = rig_of("states")
    insert(rig, TALK)
    insert(rig, OTHER)
    rig.keep(TALK)
    rig.keep(OTHER)
    pin = rig.cache.pin(rig.match(OTHER))
    assert rig.cache.flush() == 12
    assert rig.cache.retention.num_pages == 0
    rig.cache.unpin(pin)
    rig.check()


@pytest.mark.parametrize("what", KINDS)
def test_retention_takes_no_more_than_its_part_of_a_pool(what: str) -> None:
    sizes = {"pages": {"num_pages": 40}, "states": {"num_slots": 2}, "windows": {"num_pages": 44}}[what]
    most = {"pages": 0.5, "states": 0.5, "windows": 0.2}[what]
    rig = rig_of(what, most=most, **sizes)
    tokens = TALK if what != "windows" else TALK[:6]
    insert(rig, tokens)
    insert(rig, OTHER)
    assert isinstance(rig.keep(tokens), Retained)
    assert rig.keep(OTHER) is NotKept.OVER_LIMIT
    assert rig.cache.retention.of(rig.match(OTHER).node) is None
    rig.check()


def test_retention_shared_pages_count_once() -> None:
    rig = rig_of("pages", num_pages=48)
    insert(rig, TALK)
    insert(rig, [*TALK[:10], 1, 2])
    assert isinstance(rig.keep(TALK), Retained)
    assert isinstance(rig.keep([*TALK[:10], 1, 2]), Retained)
    assert rig.cache.retention.num_pages == 14
    rig.check()


def test_c32_tenant_retains_its_share_by_weight() -> None:
    rig = rig_of("pages", num_pages=72, weights={"a": 1, "b": 1})
    insert(rig, TALK, tenant="a")
    insert(rig, OTHER, tenant="b")
    assert isinstance(rig.keep(TALK, tenant="a"), Retained)
    assert rig.keep(OTHER, tenant="a") is NotKept.OVER_LIMIT
    assert isinstance(rig.keep(OTHER, tenant="b"), Retained)
    rig.check()


def test_c32_prefix_of_two_tenants_is_retained_until_the_longer_time() -> None:
    rig = rig_of("pages", num_pages=72, weights={"a": 1, "b": 1})
    insert(rig, TALK, tenant="a")
    rig.keep(TALK, 30.0, tenant="a", num=6)
    rig.keep(TALK, 60.0, tenant="b")
    assert rig.cache.retention.num_pages == 12
    rig.later(30.0)
    assert rig.cache.retention.num_pages == 12
    assert rig.cache.retention.held["pages"] == {"a": 0, "b": 12}
    rig.check()


def test_c32_tenant_without_room_for_a_longer_time_extends_that_of_another() -> None:
    rig = rig_of("pages", num_pages=72, weights={"a": 5, "b": 1})
    insert(rig, TALK, tenant="a")
    rig.keep(TALK, 60.0, tenant="a")
    rig.later(10.0)
    found = rig.keep(TALK, 3600.0, tenant="b")
    assert (found.tenant, found.until) == ("a", 70.0)
    rig.check()


def test_retention_survives_splits_and_longer_prompts() -> None:
    rig = rig_of("windows", page_size=2)
    insert(rig, TALK)
    rig.keep(TALK)
    insert(rig, [*TALK[:6], 1, 2, 3, 4])
    insert(rig, [*TALK, 5, 6])
    rig.check()
    rig.cache.evict(rig.cache.num_pages - 6)
    assert rig.found(TALK) == 12
    rig.check()


def test_retained_leaf_that_is_discarded_leaves_no_retention() -> None:
    rig = rig_of("states")
    insert(rig, TALK)
    rig.keep(TALK)
    assert rig.cache.discard(key(TALK), 4, "") == 8
    assert rig.cache.retention.num_pages == 0
    rig.check()


def test_clear_forgets_every_retention() -> None:
    rig = rig_of("states")
    insert(rig, TALK)
    rig.keep(TALK)
    rig.cache.clear()
    rig.kv.clear()
    insert(rig, OTHER)
    assert rig.cache.retention.num_pages == 0
    rig.states.pool.take_ids(rig.states.pool.num_free, ALICE)
    rig.states.evict(1)
    rig.cache.check([])
