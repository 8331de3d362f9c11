"""A-1: rows, KV pages and the prefix cache under random calls, against a model of plain dictionaries.

The model says which page holds which prefix: `(namespace, tokens as bytes) -> page`, one entry per cached page.
"""

from array import array

import numpy as np
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.config.engine_config import EvictionPolicy
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Node
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import PAD, Holder, LedgerError, OutOfSlots
from tests.tiers import examples

MAX_PAGES_PER_REQUEST = 5
NUM_ROWS = 4
# Two values only, so that prompts share prefixes, branch within pages and split edges all the time.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_PAGES_PER_REQUEST * 3)
NAMESPACES = st.sampled_from(["", "tenant"])
PARTS = st.sampled_from([0.0, 0.3, 0.6, 1.0])  # of the pools, which may be retained
TTLS = st.sampled_from([10.0, 30.0])


def spare_pages(cache: RadixCache) -> set[int]:
    """Return the pages that no request reads and that are not retained."""
    nodes = (node for node in cache.index.nodes() if not node.locks and node not in cache.retention.nodes)
    return {page for node in nodes for page in node.pages.tolist()}


class Tenant:
    """A request as the pools see one: a row, pages of its own after those it holds through its pin."""

    def __init__(self, id: int, tokens: list[int], namespace: str) -> None:
        self.id, self.namespace = id, namespace
        self.key = array("i", tokens).tobytes()
        self.row = PAD
        self.pin = None
        self.own = np.empty(0, dtype=np.int64)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        num_pages=st.integers(4, 14),
        policy=st.sampled_from(list(EvictionPolicy)),
        part=PARTS,
    )
    def build(self, page_size: int, num_pages: int, policy: EvictionPolicy, part: float) -> None:
        self.page_bytes = 4 * page_size
        self.kv = PagedKvAllocator(num_pages, page_size)
        self.rows = ReqToTokenPool(NUM_ROWS, MAX_PAGES_PER_REQUEST * 3, page_size=page_size)
        self.cache = RadixCache(self.kv, page_size, policy=policy, weights={"a": 2}, most_retained=part)
        self.now = 0.0
        self.tenants: list[Tenant] = []
        self.cached: dict[tuple[str, bytes], int] = {}
        self.num_tenants = 0
        self.generations = self.rows.generation.copy()

    # -- requests -----------------------------------------------------------------------------------------------------

    @rule(tokens=PROMPTS, namespace=NAMESPACES, priority=st.integers(0, 2))
    def admit(self, tokens: list[int], namespace: str, priority: int) -> None:
        self.num_tenants += 1
        tenant = Tenant(self.num_tenants, tokens, namespace)
        match = self.cache.index.match(tenant.key, namespace)
        assert match.pages.tolist() == self.longest_prefix(tenant.key, namespace)
        tenant.pin = self.cache.pin(match, namespace, priority, at=self.now)
        need = -(-len(tenant.key) // self.page_bytes) - len(match.pages)
        fits = need <= self.kv.num_free + self.cache.num_evictable
        if not fits or not self.rows.available_size():
            self.cache.unpin(tenant.pin)
            return
        self.evict(max(0, need - self.kv.num_free))
        tenant.own = self.kv.take_ids(need, tenant.id)
        self.rows.alloc([tenant])
        self.tenants.append(tenant)

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, NUM_ROWS - 1), computed=st.integers(0, 20))
    def adopt(self, which: int, computed: int) -> None:
        """A step completed: the cache takes over the whole pages it wrote."""
        tenant = self.tenants[which % len(self.tenants)]
        start, stop = tenant.pin.num_pages, min(computed * 4, len(tenant.key)) // self.page_bytes
        if stop <= start:
            return
        pages = tenant.own[: stop - start]
        there = self.longest_prefix(tenant.key[: stop * self.page_bytes], tenant.namespace)[start:]
        adoption = self.cache.extend_pin(tenant.pin, tenant.key[: stop * self.page_bytes], pages, tenant.id)
        assert adoption.replaced.tolist() == there
        assert adoption.num_adopted == len(pages) - len(there)
        for at, page in enumerate(pages.tolist(), start):
            self.cached.setdefault((tenant.namespace, tenant.key[: (at + 1) * self.page_bytes]), page)
        tenant.own = tenant.own[stop - start :]
        if there:
            self.kv.return_ids(pages[: len(there)], tenant.id)

    @precondition(lambda self: self.tenants)
    @rule(which=st.integers(0, NUM_ROWS - 1))
    def leave(self, which: int) -> None:
        tenant = self.tenants.pop(which % len(self.tenants))
        self.kv.return_ids(tenant.own, tenant.id)
        self.rows.free(tenant)
        self.cache.unpin(tenant.pin)

    # -- the cache's own ----------------------------------------------------------------------------------------------

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        pinned = {
            (tenant.namespace, tenant.key[: (at + 1) * self.page_bytes])
            for tenant in self.tenants
            for at in range(tenant.pin.num_pages)
        }
        spare = spare_pages(self.cache)
        num_given_up = self.cache.retention.num_given_up
        count = self.cache.evict(num_pages)
        left = self.in_tree()
        if self.cache.retention.num_given_up > num_given_up:
            assert not spare & {*left.values()}, "a retained prefix went before pages that nobody wants"
        assert left.items() <= self.cached.items()
        assert pinned <= left.keys()
        assert count == len(self.cached) - len(left) <= num_pages
        assert count == num_pages or self.cache.num_evictable == 0
        self.cached = left

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        left = self.in_tree()
        assert left.items() <= self.cached.items()
        assert self.cache.num_evictable == 0
        assert not [*self.cache.retention]
        self.cached = left

    # -- retaining ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.cached)
    @rule(which=st.integers(0, 40), ttl_s=TTLS, tenant=st.sampled_from(["", "a"]))
    def retain(self, which: int, ttl_s: float, tenant: str) -> None:
        namespace, key = sorted(self.cached)[which % len(self.cached)]
        self.cache.retain(self.cache.index.match(key, namespace), tenant, ttl_s, self.now)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.retention.expire(self.now)

    @invariant()
    def nothing_is_retained_longer_than_asked(self) -> None:
        assert all(self.now < found.until <= self.now + found.ttl_s for found in self.cache.retention)

    # -- groups and mistakes ------------------------------------------------------------------------------------------

    @rule(size=st.integers(0, 6), taken=st.integers(0, 8), raises=st.booleans())
    def group(self, size: int, taken: int, raises: bool) -> None:
        """C7: a group hides nothing, and leaving it by an exception loses nothing."""
        free, held = self.kv.num_free, []
        try:
            with self.kv.group(size):
                assert self.kv.num_free == free
                held += [self.kv.take_ids(1, 10**6) for _ in range(min(taken, free))]
                assert self.kv.num_free == free - len(held)
                if taken > free:
                    self.kv.take_ids(1, 10**6)
                if raises:
                    raise ValueError
        except (ValueError, OutOfSlots):
            assert raises or taken > free
        for ids in held:
            self.kv.return_ids(ids, 10**6)
        assert self.kv.num_free == free

    @precondition(lambda self: self.tenants and self.kv.num_free)
    @rule(which=st.integers(0, NUM_ROWS - 1), mistake=st.sampled_from(["free", "foreign", "padding", "outside"]))
    def wrong_return(self, which: int, mistake: str) -> None:
        """C8: detected, attributed, and without effect."""
        tenant = self.tenants[which % len(self.tenants)]
        foreign = [page for other in self.tenants if other is not tenant for page in other.own.tolist()]
        foreign += list(self.cached.values())
        page = {
            "free": int(np.flatnonzero(self.kv.owner[1:] <= -16)[0]) + 1,
            "foreign": foreign[0] if foreign else PAD,
            "padding": PAD,
            "outside": self.kv.capacity + 1,
        }[mistake]
        with pytest.raises(LedgerError, match=f"request {tenant.id}"):
            self.kv.return_ids(np.array([page], dtype=np.int64), tenant.id)

    # -- what holds at all times --------------------------------------------------------------------------------------

    @invariant()
    def every_row_and_page_has_one_holder(self) -> None:
        self.rows.audit([tenant.row for tenant in self.tenants])
        self.cache.check([tenant.pin for tenant in self.tenants])
        held = [Holder(tenant.id, tenant.own) for tenant in self.tenants]
        self.kv.audit([*held, self.cache.holder()])
        owned = sum(len(tenant.own) for tenant in self.tenants)
        assert self.kv.num_free + owned + len(self.cached) == self.kv.capacity

    @invariant()
    def the_tree_holds_exactly_what_was_adopted(self) -> None:
        assert self.in_tree() == self.cached

    @invariant()
    def generations_only_grow(self) -> None:
        assert (self.rows.generation >= self.generations).all()
        self.generations = self.rows.generation.copy()

    # -- the model's side ---------------------------------------------------------------------------------------------

    def longest_prefix(self, key: bytes, namespace: str) -> list[int]:
        pages: list[int] = []
        while len(key) >= (end := (len(pages) + 1) * self.page_bytes) and (namespace, key[:end]) in self.cached:
            pages.append(self.cached[namespace, key[:end]])
        return pages

    def in_tree(self) -> dict[tuple[str, bytes], int]:
        found: dict[tuple[str, bytes], int] = {}

        def walk(node: Node, namespace: str, key: bytes) -> None:
            for at, page in enumerate(node.pages.tolist()):
                found[namespace, key + node.key[: (at + 1) * self.page_bytes]] = page
            for child in node.children.values():
                walk(child, namespace, key + node.key)

        for namespace, root in self.cache.index.roots.items():
            walk(root, namespace, b"")
        return found


QUICK = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    derandomize=True,
)
FULL = settings(QUICK, max_examples=500, stateful_step_count=60)
FULL_PARTS = 4  # the scorecard's 2,000 examples


def run_at_full_size(machine: type[RuleBasedStateMachine], part: int) -> None:
    run_state_machine_as_test(seed(part)(lambda: machine()), settings=FULL)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = QUICK


@pytest.mark.slow
@pytest.mark.parametrize("part", range(FULL_PARTS))
def test_a1_at_full_size(part):
    run_at_full_size(PoolMachine, part)
