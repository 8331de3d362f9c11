"""A-1 for hybrids: rows with state slots, KV pages, window pages and the prefix cache over all three, under random
calls, against a model of plain dictionaries.

The model says what is kept of which prefix, `(namespace, tokens as bytes)`: its page, whether the window of that page
is there, and the state after it. From these alone it says where a hit must end.
"""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.memory.kinds.kind import Kinds
from forebay.memory.kinds.state.cached_states import CachedStates, RetainedStates
from forebay.memory.kinds.state.hybrid_rows import HybridReqToTokenPool
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Match, Node, Pin
from forebay.memory.slots import PAD, Holder, Ids
from tests.kinds_of import CachedAlone
from tests.memory.test_pool_machine import (
    FULL_PARTS,
    MAX_PAGES_PER_REQUEST,
    NAMESPACES,
    NUM_ROWS,
    PARTS,
    QUICK,
    TTLS,
    run_at_full_size,
    spare_pages,
)
from tests.tiers import examples

Prefix = tuple[str, bytes]
WHICH = st.integers(0, NUM_ROWS - 1)
LONGEST = MAX_PAGES_PER_REQUEST * 3
# Two trunks, left anywhere: prompts share prefixes and part from each other all the time.
TRUNKS = ([0] * LONGEST, [0, 1] * LONGEST)
CONVERSATIONS = st.builds(
    lambda trunk, shared, rest: [*trunk[:shared], *rest][:LONGEST],
    st.sampled_from(TRUNKS),
    st.integers(2, LONGEST),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


class Tenant:
    """A request as the pools see one. `pages` are all of its row's; `window_start` the first whose window it holds."""

    def __init__(self, id: int, key: bytes, namespace: str) -> None:
        self.id, self.namespace, self.key = id, namespace, key
        self.row = PAD
        self.pages: list[int] = []
        self.num_written = 0  # pages that completed steps have written
        self.window_start = 0
        self.state_len = -1  # pages after which its live state is
        self.pin: Pin


class HybridPoolMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        num_pages=st.integers(6, 16),
        window=st.sampled_from([2, 3, 5]),
        spare_states=st.integers(0, 4),
        part=PARTS,
    )
    def build(self, page_size: int, num_pages: int, window: int, spare_states: int, part: float) -> None:
        self.page_size, self.page_bytes = page_size, 4 * page_size
        self.kv = PagedKvAllocator(num_pages, page_size)
        self.rows = HybridReqToTokenPool(
            NUM_ROWS,
            MAX_PAGES_PER_REQUEST * 3,
            page_size=page_size,
            mamba_size=NUM_ROWS + spare_states,
            num_tracking=0,
        )
        self.windows = Windows(num_pages, num_pages, self.rows, window=window)
        self.kept = CachedStates(self.rows.mamba_pool)
        kinds = Kinds([CachedAlone(self.kept, RetainedStates(self.kept)), self.windows])
        self.cache = RadixCache(self.kv, page_size, kinds=kinds, weights={"a": 2}, most_retained=part)
        self.now = 0.0
        self.tenants: list[Tenant] = []
        self.retracted: list[tuple[bytes, str]] = []
        self.cached: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.num_tenants = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    @rule(prompts=st.lists(CONVERSATIONS, min_size=1, max_size=3), namespace=NAMESPACES, pages=st.integers(0, 5))
    def arrive(self, prompts: list[list[int]], namespace: str, pages: int) -> None:
        """Some requests, each with a first step that may write all of its prompt."""
        for tokens in prompts:
            known = len(self.tenants)
            self.admit(array("i", tokens).tobytes(), namespace)
            if pages and len(self.tenants) > known:
                self.advance(self.tenants[-1], pages, adopts=True, snapshot=True)

    @precondition(lambda self: self.retracted)
    @rule(which=st.integers(0, 3))
    def come_back(self, which: int) -> None:
        """What was retracted is admitted again, from whatever is left of it in the cache."""
        self.admit(*self.retracted.pop(which % len(self.retracted)))

    def admit(self, key: bytes, namespace: str) -> None:
        self.num_tenants += 1
        tenant = Tenant(self.num_tenants, key, namespace)
        match = self.cache.index.match(key, namespace)
        self.check_match(match, key, namespace)
        tenant.pin = self.cache.pin(match, namespace, at=self.now)
        total, held = -(-len(key) // self.page_bytes), len(match.pages)
        needed = self.first_read(held * self.page_size)
        if held:
            self.kept.lock(tenant.pin.node, match.pages)
        self.windows.map.lock(match.pages[needed:])
        num_states = self.rows.mamba_pool.num_free + self.kept.num_evictable
        fits = total - held <= self.kv.num_free + self.cache.num_evictable and num_states
        if not fits or not self.rows.available_size() or not self.take_windows_of(total - held):
            self.windows.map.unlock(match.pages[needed:])
            if held:
                self.kept.unlock(tenant.pin.node, match.pages)
            self.cache.unpin(tenant.pin)
            return
        self.evict(max(0, total - held - self.kv.num_free))
        self.evict_states(max(0, 1 - self.rows.mamba_pool.num_free))
        own = self.kv.take_ids(total - held, tenant.id)
        self.windows.take(own, tenant.id)
        self.rows.alloc([tenant])
        if held:  # the state is copied by the first step
            self.kept.unlock(tenant.pin.node, match.pages)
        tenant.pages = [*match.pages.tolist(), *own.tolist()]
        tenant.num_written = tenant.state_len = held
        tenant.window_start = needed
        self.tenants.append(tenant)

    def take_windows_of(self, count: int) -> bool:
        """Make room for so many windows; whether there is."""
        short = count - self.windows.slots.num_free
        if short > 0:
            self.evict_windows(short)
        return count <= self.windows.slots.num_free

    @precondition(lambda self: self.tenants)
    @rule(which=WHICH, pages=st.integers(1, 3), adopts=st.sampled_from([False, True, True]), snapshot=st.booleans())
    def run(self, which: int, pages: int, adopts: bool, snapshot: bool) -> None:
        """A step writes some whole pages and completes: the live state moves with it, the cache takes what is written,
        and a snapshot of the state where there is a slot for one."""
        self.advance(self.pick(which), pages, adopts=adopts, snapshot=snapshot)

    def advance(self, tenant: Tenant, pages: int, *, adopts: bool, snapshot: bool) -> None:
        tenant.num_written = min(tenant.num_written + pages, len(tenant.key) // self.page_bytes)
        tenant.state_len = tenant.num_written
        start, stop = tenant.pin.num_pages, tenant.num_written
        if adopts and start < stop:
            self.take_over(tenant, start, stop)
            if snapshot and self.rows.mamba_pool.num_free:
                self.give_state(tenant, self.rows.mamba_pool.take_one(tenant.id))
        self.slide(tenant)

    def take_over(self, tenant: Tenant, start: int, stop: int) -> None:
        own = np.array(tenant.pages[start:stop], dtype=np.int64)
        key = tenant.key[: stop * self.page_bytes]
        there = self.prefix_pages(key, tenant.namespace)[start:]
        adoption = self.cache.extend_pin(tenant.pin, key, own, tenant.id)
        assert adoption.replaced.tolist() == there
        assert adoption.num_adopted == len(own) - len(there)
        for at in range(start, stop):
            self.cached.setdefault(self.prefix(tenant, at + 1), tenant.pages[at])
        tenant.pages[start : start + len(there)] = there
        replaced = own[: len(there)]
        self.windows.slots.return_ids(self.windows.map.detach(replaced), tenant.id)
        self.kv.return_ids(replaced, tenant.id)
        # Of the pages that are the cache's now it goes on reading those whose windows it holds.
        tenant.window_start = max(tenant.window_start, self.first_window(tenant, start, stop))
        self.windows.map.lock(np.array(tenant.pages[max(start, tenant.window_start) : stop], dtype=np.int64))

    def first_window(self, tenant: Tenant, start: int, stop: int) -> int:
        """Windows that the cache had lost, and the request behind them too, are not there to be locked."""
        gone = [
            at for at in range(start, stop) if not self.windows.map.is_there(self.ids(tenant.pages[at : at + 1]))[0]
        ]
        return gone[-1] + 1 if gone else 0

    def give_state(self, tenant: Tenant, slot: int) -> None:
        prefix = self.prefix(tenant, tenant.pin.num_pages)
        taken = self.kept.attach(tenant.pin, slot, tenant.pin.num_pages * self.page_size, tenant.id)
        assert taken == (prefix not in self.states)
        if taken:
            self.states[prefix] = slot
        else:
            self.rows.mamba_pool.free([slot], tenant.id)

    def slide(self, tenant: Tenant) -> None:
        """The window has moved past what is written."""
        first = self.first_read(tenant.num_written * self.page_size)
        if first > tenant.window_start:
            self.let_go_of_windows(tenant, tenant.window_start, first)
            tenant.window_start = first

    def let_go_of_windows(self, tenant: Tenant, start: int, stop: int) -> None:
        pinned = min(max(tenant.pin.num_pages - start, 0), stop - start)
        pages = self.ids(tenant.pages[start:stop])
        self.windows.map.unlock(pages[:pinned])
        self.windows.slots.return_ids(self.windows.map.detach(pages[pinned:]), tenant.id)

    @precondition(lambda self: self.tenants)
    @rule(which=WHICH, retracted=st.booleans(), keeps_state=st.booleans())
    def leave(self, which: int, retracted: bool, keeps_state: bool) -> None:
        """The end of a request, or its retraction: its live state goes to the cache if a page ends there."""
        tenant = self.pick(which)
        self.tenants.remove(tenant)
        slots = self.rows.take_slots(tenant.row)
        if keeps_state and 0 < tenant.state_len == tenant.pin.num_pages:
            self.give_state(tenant, slots.pop())
        self.rows.mamba_pool.free(slots, tenant.id)
        self.let_go_of_windows(tenant, tenant.window_start, len(tenant.pages))
        self.kv.return_ids(self.ids(tenant.pages[tenant.pin.num_pages :]), tenant.id)
        self.rows.free(tenant)
        self.cache.unpin(tenant.pin)
        if retracted:
            self.retracted.append((tenant.key, tenant.namespace))

    # -- the cache's own ----------------------------------------------------------------------------------------------

    @rule(num_pages=st.integers(0, 4), num_states=st.integers(0, 2), num_windows=st.integers(0, 4))
    def make_room(self, num_pages: int, num_states: int, num_windows: int) -> None:
        self.evict_windows(num_windows)
        self.evict_states(num_states)
        self.evict(num_pages)

    def evict(self, num_pages: int) -> None:
        pinned = {self.prefix(tenant, at + 1) for tenant in self.tenants for at in range(tenant.pin.num_pages)}
        before, spare, num_given_up = len(self.cached), spare_pages(self.cache), self.cache.retention.num_given_up
        count = self.cache.evict(num_pages)
        left, states = self.in_tree()
        if self.cache.retention.num_given_up > num_given_up:
            assert not spare & {*left.values()}, "a retained prefix went before pages that nobody wants"
        assert left.items() <= self.cached.items()
        assert states.items() <= self.states.items()
        assert pinned <= left.keys()
        assert count == before - len(left)
        assert count >= num_pages or self.cache.num_evictable == 0
        self.cached, self.states = left, states

    def evict_states(self, num_states: int) -> None:
        spare = {
            slot
            for node in self.cache.index.nodes()
            if (slot := self.kept.slot_of(node)) and node not in self.kept.retained and not self.kept._at[node].locks
        }
        num_given_up = self.cache.retention.num_given_up
        count = self.kept.evict(num_states)
        left, states = self.in_tree()
        if self.cache.retention.num_given_up > num_given_up:
            assert not spare & {*states.values()}, "a retained state went before others"
        assert left == self.cached
        assert states.items() <= self.states.items()
        assert count == len(self.states) - len(states)
        assert count == num_states or self.kept.num_evictable == 0
        self.states = states

    def evict_windows(self, num_windows: int) -> None:
        locked = [page for page in self.cached.values() if self.windows.map.locks[page]]
        free, map_ = self.windows.slots.num_free, self.windows.map
        spare = [page for page in self.cached.values() if not map_.locks[page] and not map_.retained[page]]
        num_given_up = self.cache.retention.num_given_up
        count = self.windows.in_tree.evict(num_windows)
        if self.cache.retention.num_given_up > num_given_up:
            assert not map_.is_there(self.ids(spare)).any(), "a retained window went before others"
        assert self.windows.slots.num_free == free + count
        assert count == num_windows or self.windows.in_tree.num_evictable == 0
        assert self.windows.map.is_there(self.ids(locked)).all()

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        left, states = self.in_tree()
        assert left.items() <= self.cached.items()
        assert self.cache.num_evictable == 0
        assert not [*self.cache.retention]
        self.cached, self.states = left, states

    @precondition(lambda self: self.cached)
    @rule(which=st.integers(0, 40), ttl_s=TTLS, tenant=st.sampled_from(["", "a"]))
    def retain(self, which: int, ttl_s: float, tenant: str) -> None:
        """A request wants some prefix kept: as much of it as can be resumed."""
        namespace, key = sorted(self.cached)[which % len(self.cached)]
        match = self.cache.index.match(key, namespace)
        if match.num_tokens:
            self.cache.retain(match, tenant, ttl_s, self.now)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.retention.expire(self.now)

    # -- what holds at all times --------------------------------------------------------------------------------------

    @invariant()
    def every_slot_of_every_pool_has_one_holder(self) -> None:
        self.rows.audit([tenant.row for tenant in self.tenants])
        self.cache.check([tenant.pin for tenant in self.tenants])
        pages, windows, slots = [], [], []
        for tenant in self.tenants:
            own = self.ids(tenant.pages[tenant.pin.num_pages :])
            pages.append(Holder(tenant.id, own))
            there = self.windows.map.full_to_window[own]
            windows.append(Holder(tenant.id, there[there != PAD].astype(np.int64)))
            slots.append(Holder(tenant.id, self.ids(self.rows.slots_of(tenant.row))))
        self.kv.audit([*pages, self.cache.holder()])
        self.windows.slots.audit([*windows, self.windows.in_tree.cached(self.cache.index.nodes())])
        self.rows.mamba_pool.audit([*slots, self.kept.cached(self.cache.index.nodes())])

    @invariant()
    def the_tree_holds_exactly_what_was_adopted(self) -> None:
        assert self.in_tree() == (self.cached, self.states)

    @invariant()
    def what_is_read_has_its_window(self) -> None:
        """C5: nobody's window goes while somebody reads it, and nothing stays locked that nobody reads."""
        locks = np.zeros_like(self.windows.map.locks)
        for tenant in self.tenants:
            read = self.ids(tenant.pages[tenant.window_start : tenant.pin.num_pages])
            assert self.windows.map.is_there(read).all()
            locks[read] += 1
        assert (locks == self.windows.map.locks).all()
        cached = self.ids(list(self.cached.values()))
        assert self.windows.num_cached == int(self.windows.map.is_there(cached).sum())

    # -- the model's side ---------------------------------------------------------------------------------------------

    def check_match(self, match: Match, key: bytes, namespace: str) -> None:
        """A hit ends at the last place where the KV, the whole window before it, and a state are all there."""
        pages = self.prefix_pages(key, namespace)
        assert match.kv_tokens == len(pages) * self.page_size

        def has_window(end: int) -> bool:
            first = self.first_read(end * self.page_size)
            return bool(self.windows.map.is_there(self.ids(pages[first:end])).all())

        def has_state(end: int) -> bool:
            return end == 0 or (namespace, key[: end * self.page_bytes]) in self.states

        end = max(end for end in range(len(pages) + 1) if has_state(end) and has_window(end))
        assert match.pages.tolist() == pages[:end]
        assert match.resumable.get("state", 0) == self.page_size * max(e for e in range(len(pages) + 1) if has_state(e))
        assert match.resumable.get("window", 0) == self.page_size * max(
            e for e in range(len(pages) + 1) if has_window(e)
        )

    def first_read(self, kv_len: int) -> int:
        """Index of the first page that the token at position `kv_len` attends to: itself and window - 1 before it."""
        return max(0, kv_len - self.windows.map.window + 1) // self.page_size

    def prefix(self, tenant: Tenant, num_pages: int) -> Prefix:
        return tenant.namespace, tenant.key[: num_pages * self.page_bytes]

    def prefix_pages(self, key: bytes, namespace: str) -> list[int]:
        pages: list[int] = []
        while len(key) >= (end := (len(pages) + 1) * self.page_bytes) and (namespace, key[:end]) in self.cached:
            pages.append(self.cached[namespace, key[:end]])
        return pages

    def in_tree(self) -> tuple[dict[Prefix, int], dict[Prefix, int]]:
        """The pages and the states of the cache by prefix."""
        pages: dict[Prefix, int] = {}
        states: dict[Prefix, int] = {}

        def walk(node: Node, namespace: str, key: bytes) -> None:
            for at, page in enumerate(node.pages.tolist()):
                pages[namespace, key + node.key[: (at + 1) * self.page_bytes]] = page
            if slot := self.kept.slot_of(node):
                states[namespace, key + node.key] = slot
            for child in node.children.values():
                walk(child, namespace, key + node.key)

        for namespace, root in self.cache.index.roots.items():
            walk(root, namespace, b"")
        return pages, states

    def pick(self, which: int) -> Tenant:
        return self.tenants[which % len(self.tenants)]

    @staticmethod
    def ids(values: list[int]) -> Ids:
        return np.array(values, dtype=np.int64)


TestHybridPoolMachine = HybridPoolMachine.TestCase
TestHybridPoolMachine.settings = settings(QUICK, max_examples=examples(40))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(FULL_PARTS))
def test_a1_hybrids_at_full_size(part):
    run_at_full_size(HybridPoolMachine, part)
