"""Each bound of the host's memory at its value, and what a survey of the prefix cache tells of a node."""

from __future__ import annotations

import logging
from hashlib import blake2b

import numpy as np
import pytest

from forebay.base.errors import Conflict, NotFound
from forebay.config.engine_config import Ledger
from forebay.memory import slots
from forebay.memory.anchors import MAX_PER_PROMPT, MIN_DISTANCE, Reason, plan_anchors
from forebay.memory.kinds.state.hybrid_rows import effective_mamba_size, tracking_slots
from forebay.memory.kinds.window.demand import window_margin, window_pages_in_flight, window_pages_per_request
from forebay.memory.miss_reason import NEVER_REUSED, MissReason
from forebay.memory.radix_node import OPERATOR, Shares, Tenants, may_see
from forebay.memory.radix_survey import survey
from forebay.memory.slots import Holder, LedgerError, Slots, as_ids
from tests.memory.test_adapters import Rig as Adapting
from tests.memory.test_radix_cache import Rig, key

HOUR_S = 3600.0


def test_owners_are_told_apart_and_free_slots_are_below_them_all() -> None:
    owners = [slots.NO_OWNER, slots.CACHE, slots.GROUP, slots.QUARANTINE, slots.LOADING, slots.FREE]
    assert owners == sorted(set(owners), reverse=True)
    assert owners[0] == 0, "requests have positive numbers"


@pytest.mark.parametrize("count", [4, 5])
def test_ledger_error_names_8_slots_and_that_there_are_more(count: int) -> None:
    pool = Slots("kv", 20)
    ids = pool.take_ids(count, 1)
    with pytest.raises(LedgerError) as found:
        pool.audit([Holder(1, ids), Holder(1, ids)])
    shown = ", ".join(map(str, [*ids.tolist(), *ids.tolist()][:8])) + ", ..." * (count > 4)
    assert str(found.value) == f"kv: [{shown}] of request 1 have another holder too"


@pytest.mark.parametrize("size", [4095, 4096, 4097, 9000])
def test_audit_of_a_pool_that_is_looked_at_in_parts_finds_a_leak_anywhere(size: int) -> None:
    pool = Slots("kv", size)
    ids = pool.take_ids(size, 1)
    pool.audit([Holder(1, ids)])
    pool.audit([Holder(1, ids[:10]), Holder(1, ids[10:])])
    for at in (0, 4095, size // 2, size - 1):
        at = min(at, size - 1)
        with pytest.raises(LedgerError, match=f"slot {ids[at]} is booked for request 1 but held by nobody; 1 slots"):
            pool.audit([Holder(1, np.delete(ids, at))])


def test_all_equal_compares_every_part() -> None:
    for length in (0, 1, 4096, 4097, 8192):
        first = np.arange(length)
        assert slots.all_equal(first, first.copy())
        for at in {0, length // 2, length - 1} if length else ():
            other = first.copy()
            other[at] += 1
            assert not slots.all_equal(first, other)


def test_violations_are_logged_with_the_pool_and_the_fault(caplog: pytest.LogCaptureFixture) -> None:
    pool = Slots("kv", 4, ledger=Ledger.COUNT)
    pool.take_ids(2, 1)
    with caplog.at_level(logging.ERROR, logger="forebay"):
        pool.return_ids(as_ids([1]), 2)
    assert "ledger_violation" in caplog.text
    assert "pool=kv" in caplog.text
    assert "free of a foreign slot of slot 1 by request 2; the ledger books it for request 1" in caplog.text


@pytest.mark.parametrize(("distance", "kept"), [(31, False), (32, True)])
def test_anchor_of_a_hint_is_32_tokens_from_a_better_one(distance: int, kept: bool) -> None:
    assert (MIN_DISTANCE, MAX_PER_PROMPT) == (32, 8)
    for point in (500 - distance, 500 + distance):
        found = plan_anchors(
            start=0, num_prompt=1001, page_size=1, resume_points=[point], branches=[500], interval=5000
        )
        assert (point in [anchor.length for anchor in found]) is kept


def test_anchors_of_branches_and_the_end_are_a_token_apart_and_reasons_are_ranked() -> None:
    found = plan_anchors(start=0, num_prompt=11, page_size=1, resume_points=[], branches=[5, 6, 6, 9], interval=50)
    assert found == [(5, Reason.BRANCH), (6, Reason.BRANCH), (9, Reason.BRANCH), (10, Reason.END)]
    assert [*Reason] == [Reason.INTERVAL, Reason.RESUME, Reason.END, Reason.BRANCH]


def test_reasons_for_which_no_prefix_is_reused() -> None:
    assert set(NEVER_REUSED) == {MissReason.DISABLED, MissReason.PROMPT_LOGPROBS, MissReason.POOLING}


def test_author_sees_its_own_tokens_and_the_operator_all() -> None:
    assert [may_see("a", "a"), may_see(OPERATOR, "a"), may_see("a", "b"), may_see("a", OPERATOR)] == [1, 1, 0, 0]


@pytest.mark.parametrize(("later_s", "idle"), [(HOUR_S, set()), (HOUR_S + 0.5, {"a"})])
def test_c32_tenant_is_idle_an_hour_after_its_last_use(later_s: float, idle: set[str]) -> None:
    tenants = Tenants({})
    tenants.use("a", 10.0)
    tenants.use("b", 10.0 + later_s)
    tenants.use("b", 5.0)  # a use that is told late does not turn the clock back
    assert tenants.idle == idle
    tenants.use("a", 10.0 + later_s)
    assert tenants.idle == set()


def test_c32_tenant_that_holds_most_for_its_weight_is_left_as_much_as_the_next_one() -> None:
    shares = Shares(Tenants({"b": 2}))
    for tenant, count in (("a", 9), ("b", 8), ("c", 1)):
        shares.add(tenant, count)
    turns = shares.turns()
    assert next(turns) == ("a", 4), "b holds 4 for each part of its weight"
    shares.add("a", -5)
    assert next(turns) in {("a", 3), ("b", 7)}, "a slot at least"


def test_flush_evicts_64_leaves_at_a_time() -> None:
    rig = Rig(page_size=1, num_pages=200)
    for token in range(130):
        rig.insert(token)
    assert rig.cache.begin_flush() == 130
    left = []
    while rig.cache.continue_flush():
        left.append(rig.cache.num_pages)
    assert left == [66, 2]


def test_released_prefixes_are_remembered_for_256_namespaces_and_4096_first_pages() -> None:
    rig = Rig(page_size=1, num_pages=6000)
    for token in range(4100):
        rig.insert(token, namespace="n0")
    for number in range(1, 300):
        rig.insert(1, namespace=f"n{number}")
    rig.cache.clear(released=True)
    assert [*rig.cache.index.roots] == [f"n{number}" for number in range(256)]
    assert len(rig.cache.index.roots["n0"].tombstones) == 4096
    assert rig.reason(4099, namespace="n0") is MissReason.RELEASED
    assert rig.reason(3, namespace="n0") is MissReason.EMPTY, "the first ones are forgotten"


def test_released_evictions_are_remembered_more_than_others() -> None:
    rig = Rig(page_size=1, num_pages=5000)
    for token in range(4100):
        rig.insert(token)
    held = rig.pin(4099)
    rig.cache.evict(4099, MissReason.RELEASED)
    assert len(rig.cache.index.roots[""].tombstones) == 4096
    rig.cache.unpin(held)


@pytest.mark.parametrize(("siblings", "found"), [(31, True), (32, False)])
def test_c20_nearest_of_the_first_32_children_is_looked_at(siblings: int, found: bool) -> None:
    rig = Rig(page_size=2, num_pages=100)
    for token in range(siblings):
        rig.insert(100 + token, 0)
    rig.insert(7, 8)
    assert rig.cache.index.differs(key(7, 9)) == ((1, 8) if found else (0, 100))


def test_discard_drops_a_page_and_all_behind_it() -> None:
    rig = Rig(page_size=2)
    rig.insert(1, 2, 3, 4, 5, 6)
    rig.insert(1, 2, 3, 4, 7, 8)
    rig.insert(9, 9)
    assert rig.cache.discard(key(1, 2, 3, 4, 5, 6), 1, "") == 3
    assert (rig.cached(1, 2, 3, 4, 7, 8), rig.cached(9, 9)) == (2, 2)
    rig.check()
    assert rig.cache.discard(key(1, 2), 1, "") == 0, "what is not there"
    assert rig.cache.discard(key(1, 2), 0, "other") == 0
    assert rig.cache.discard(key(1, 2), 0, "") == 1
    rig.check()


def test_discard_leaves_what_is_pinned() -> None:
    rig = Rig(page_size=2)
    rig.insert(1, 2, 3, 4, 5, 6)
    pin = rig.pin(1, 2, 3, 4, 5, 6)
    assert rig.cache.discard(key(1, 2, 3, 4, 5, 6), 1, "") == 0
    rig.cache.unpin(pin)
    pin = rig.pin(1, 2)
    assert rig.cache.discard(key(1, 2, 3, 4, 5, 6), 1, "") == 2
    rig.check(pin)


def test_pinned_pages_need_not_be_resumable_and_must_all_be_there() -> None:
    rig = Rig(page_size=2)
    rig.insert(1, 2, 3, 4)
    pin = rig.cache.pin_pages(key(1, 2, 3, 4), 1, author="a", tenant="t")
    assert pin is not None
    assert (pin.num_pages, pin.author, pin.tenant) == (1, "a", "t")
    rig.check(pin)
    assert rig.cache.pin_pages(key(1, 2, 3, 4, 5, 6), 3) is None
    assert rig.cache.pin_pages(key(1, 2), 1, namespace="other") is None
    assert "other" not in rig.cache.index.roots
    assert rig.cache.evict(9) == 1, "the page behind the pin"
    rig.cache.unpin(pin)
    rig.check()


def test_a_match_is_void_after_the_cache_lost_slots_of_a_kind() -> None:
    rig = Rig()
    rig.insert(1, 2)
    version = rig.cache.index.version
    rig.cache.lost(())
    assert rig.cache.index.version == version + 1


def test_survey_tells_a_node_s_author_pages_uses_and_48_first_tokens() -> None:
    rig = Rig(page_size=1, num_pages=300)
    tokens = tuple(range(60))
    pages = rig.slots.take_ids(60, 1)
    rig.cache.insert(key(*tokens), pages, 1, "space", "author")
    pin = rig.cache.pin(rig.cache.index.match(key(*tokens), "space"), "space")
    root, branch = survey(rig.cache.index, b"secret", lambda used: 100.0 - used)
    assert root is not None
    assert branch is not None
    assert (root.namespace, root.parent, root.tokens, root.num_pages) == ("space", b"", b"", 0)
    assert (branch.namespace, branch.author, branch.num_pages, branch.parent) == ("", "author", 60, root.name)
    assert (branch.locks, branch.hits, branch.idle_s) == (1, 1, 100.0 - rig.cache.clock)
    assert (branch.tokens, branch.kept) == (key(*tokens[:48]), [])
    assert [each.name for each in (root, branch)] == [
        blake2b(above + own, digest_size=8, key=b"secret").digest()
        for above, own in ((bytes(8), b"space"), (root.name, key(0)))
    ]
    rig.cache.unpin(pin)


def test_window_pages_are_those_of_the_window_the_margin_and_the_steps_in_flight() -> None:
    assert window_margin(16, 64) == 80
    assert window_pages_per_request(256, 16, 0) == 17 + 2  # 255 + 16 tokens, and two begun pages
    assert window_pages_per_request(257, 16, 0) == 17 + 2
    assert window_pages_per_request(258, 16, 0) == 18 + 2
    assert window_pages_per_request(256, 16, 1, 64, width=4) == 22 + 2  # 255 + 7 + 80 tokens
    assert [window_pages_in_flight(512, 16, depth) for depth in (0, 1)] == [32, 96]
    assert window_pages_in_flight(513, 16, 0) == 33


def test_state_slots_of_a_request_are_one_and_those_that_track_it() -> None:
    assert [tracking_slots(buffer, depth) for buffer in (False, True) for depth in (0, 1, 2)] == [0, 0, 0, 1, 2, 2]
    assert effective_mamba_size(36, 12, 2) == 36
    assert effective_mamba_size(35, 12, 2) == 36


def test_adapters_error_names_all_holders_of_slots_and_their_requests() -> None:
    rig = Adapting(2)
    rig.adapters.enter(rig.load("a"))
    rig.load("b")
    with pytest.raises(Conflict) as refused:
        rig.adapters.begin("c", "/c")
    assert str(refused.value) == (
        "all 2 slots for adapters are taken, by a (1 requests), b (0 requests): unload one, or restart with a larger "
        "--max-loras"
    )
    with pytest.raises(NotFound, match=r"the adapter 'x{200}' is not loaded; loaded are: a, b"):
        rig.adapters.named("x" * 300)
