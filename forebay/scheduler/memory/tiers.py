"""The tiers of the prefix cache behind the device: stores in them, and loads from them for requests that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from forebay.base.units import ceil_div
from forebay.config.engine_config import SchedulerConfig
from forebay.formats.prefix_files import Record, RecordedPicture, Rows
from forebay.memory.holding import Allocation
from forebay.memory.kv_allocator import KV
from forebay.memory.miss_reason import NEVER_REUSED, MissReason
from forebay.memory.radix_node import TOKEN_BYTES, Match
from forebay.memory.slots import LOADING, NO_IDS, Holder, Ids, Slots
from forebay.memory.tier import Prefix, Span, Tier, missing, of_device, untiered
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, TierCopy
from forebay.scheduler.counters import OF_TIERS, zeros
from forebay.scheduler.memory.load_rates import LoadRates
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.memory.restoring import Found, restore
from forebay.scheduler.memory.retaining import TierRetention
from forebay.scheduler.memory.tier_copies import Load, Store, namespace_in

_MOST_LOADS: Final = 2  # of its tokens, for one request: what is loaded may be evicted before the request starts


class Tiers:
    """Stores in all tiers what the device's cache adopts, and loads from one of them what a waiting request lacks.

    What a step copies is found from its commit on. A load is cut into slices, of which a request has one in flight.
    """

    def __init__(self, pools: Pools, config: SchedulerConfig) -> None:
        assert not (config.tiers and untiered(pools.kinds)), f"there are no tiers of {untiered(pools.kinds)}"
        self._pools, self._config = pools, config
        self.device = of_device(pools.kv, pools.cache, pools.kinds)
        self.all = [Tier.behind(name, pools.kinds, config) for name in config.tiers]
        self.retentions = [tier.cache.retention for tier in (self.device, *self.all)]
        self._stores: dict[int, Store] = {}
        self.retention = TierRetention(self.all, self._stores)
        self._loads: dict[int, Load] = {}
        self._last_number = 0
        self.counters = zeros(OF_TIERS)
        self.rates = LoadRates(config.kinds.recompute_bytes_per_token)
        pools.loading = self.holder

    def _prefix(self, req: Request, num_pages: int, tenant: str, namespace: str) -> Prefix:
        return Prefix(req.key(num_pages * self._config.page_size), namespace, req.author, tenant)

    def named(self, name: str) -> Tier:
        """Return the tier with a name."""
        (tier,) = (tier for tier in self.all if tier.name == name)
        return tier

    def restore(self, name: str, records: Iterable[Found], *, writable: Callable[[], bool]) -> int:
        """Take over what a tier has kept since an earlier process, before the first step; the number of tokens. Nothing
        is added to the tier once `writable` was found to return False."""
        tier = self.named(name)
        tier.writable = writable
        restore(tier, records, f"{name}_restore", self._pools.pictures)
        return tier.cache.num_pages * self._config.page_size

    def _num_bytes(self, copied: Span | TierCopy) -> int:
        slot_bytes = self._config.kinds.slot_bytes
        return sum(len(ids) * slot_bytes.get(kind, 0) for kind, ids in copied.slots.items())

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Take in the duration of a step that did nothing but load, or nothing but compute prompts."""
        if plan.host.fetches and not (plan.num_seqs or plan.host.stores):
            num_bytes = Counter[str]()
            for copy in plan.host.fetches:
                num_bytes[copy.tier] += self._num_bytes(copy)
            self.rates.loaded(num_bytes, seconds)
        elif plan.num_extends and not (plan.num_decodes or plan.host.fetches):
            self.rates.computed(plan.num_tokens, seconds)

    def _copy(self, tier: Tier, here: Span, there: Span, record: bytes = b"") -> TierCopy:
        self._last_number += 1
        return TierCopy(number=self._last_number, tier=tier.name, slots=here.slots, there=there.slots, record=record)

    # -- stores -------------------------------------------------------------------------------------------------------

    def store(self, req: Request, allocation: Allocation) -> None:
        """Copy to each tier, in the next step, what it lacks of the prefix that the cache has adopted of a request."""
        if req.is_check or not allocation.pin.num_pages:
            return
        here = self._prefix(req, allocation.pin.num_pages, allocation.pin.tenant, req.cache_namespace)
        for tier in self.all:
            namespace = namespace_in(req, tier)
            if namespace is not None and tier.stores:
                self._store_in(tier, req, here, namespace)

    def _store_in(self, tier: Tier, req: Request, here: Prefix, namespace: str) -> None:
        stores = (each for each in self._stores.values() if each.tier is tier and each.req is req)
        known = min(
            len(here.key) // self._pools.cache.index.page_bytes, max((each.span.stop for each in stores), default=0)
        )
        there = here._replace(namespace=namespace)
        source = missing(self.device, tier, here, there, whole=True, known=known)
        target = tier.take(source) if source else None
        if source and target:
            copy = self._copy(tier, source, target, _record(target, _recorded(req, target)) if tier.durable else b"")
            self._stores[copy.number] = Store(tier, target, req)
            self._pools.draft.stores.append(copy)
            self._pools.draft.copies_tiers = True

    # -- loads --------------------------------------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        """Return the number of waiting requests for which loads are in flight."""
        return len({load.req.id for load in self._loads.values() if load.req.status is Status.WAITING})

    def waits(self, req: Request) -> bool:
        """Return whether a load in flight brings more of the request's prefix, for which it then waits."""
        key = req.key(len(req.tokens) - 1) if self._loads else b""
        for load in self._loads.values():
            prefix = load.span.prefix
            if prefix.namespace == req.cache_namespace and key.startswith(prefix.key):
                req.resume_after = max(req.resume_after, load.step)
                return True
        return False

    def load(self, req: Request, match: Match, most_tokens: int, most_pages: int) -> int:
        """Copy more of a waiting request's prefix to the device than `match` has, in the next step, if a tier has more
        and copying takes less time than computing. Return the number of prompt tokens that are computed in the time of
        the copy; 0 if nothing is copied.

        A copy takes no longer than computing `most_tokens` tokens, unless one page does, and at most `most_pages`."""
        found = self._longest(req, match.num_tokens)
        if found is None or req.load_failed or sum(req.loaded.values()) > _MOST_LOADS * len(req.tokens):
            return 0
        tier, longer = found
        namespace = namespace_in(req, tier)
        assert namespace is not None, f"{req} has no prefix in {tier.name}"
        here = self._prefix(req, longer.num_tokens // self._config.page_size, req.tenant, req.cache_namespace)
        there = here._replace(namespace=namespace)
        source = missing(tier, self.device, there, here, whole=False)
        assert source is not None, f"the device resumes after {match.num_tokens} tokens, but has {longer.num_tokens}"
        worth = self.rates.worth(tier.name)
        if self._num_bytes(source) > (longer.num_tokens - match.num_tokens) * worth:
            self.rates.refused(tier.name)
            req.load_failed = True
            return 0
        source = self._slice(source, most_tokens * worth)
        target = self._take(source, most_pages)
        if target is None:
            req.load_failed = True
            return 0
        pin = tier.cache.pin(longer, namespace, req.priority, req.author, req.tenant, req.arrival)
        for kind in tier.cache.kinds.resumed:
            kind.lock(pin.node, longer.pages)
        copy = self._copy(tier, target, source)
        self._loads[copy.number] = Load(req, self._pools.draft.step, tier, there, target, longer, pin)
        self._pools.draft.fetches.append(copy)
        req.resume_after = self._pools.draft.step
        self._pools.draft.copies_tiers = True
        self._count_loading()
        return ceil_div(self._num_bytes(source), worth)

    def miss_reason(self, req: Request, match: Match) -> MissReason:
        """Return why no more of a request's prefix is reused than `match`, which the device's cache has."""
        if req.load_failed and match.reason not in (MissReason.NONE, *NEVER_REUSED):
            return MissReason.NOT_LOADED_IN_TIME
        if match.reason is MissReason.EVICTED and any(self._evicted(req, tier) for tier in self.all if tier.durable):
            return MissReason.EVICTED_FROM_DISK
        return match.reason

    def _evicted(self, req: Request, tier: Tier) -> bool:
        """Return whether a tier had more of a request's prefix once."""
        namespace = namespace_in(req, tier)
        if namespace is None:
            return False
        return tier.cache.index.match(req.key(len(req.tokens) - 1), namespace).reason is MissReason.EVICTED

    def _longest(self, req: Request, num_tokens: int) -> tuple[Tier, Match] | None:
        """Return the tier in which the longest prefix of a request's tokens can be resumed, if that is longer than
        `num_tokens`; of equal ones the first."""
        found = None
        for tier in self.all:
            namespace = namespace_in(req, tier)
            if namespace is None:
                continue
            match = tier.cache.index.match(req.key(len(req.tokens) - 1), namespace)
            if match.num_tokens > num_tokens:
                found, num_tokens = (tier, match), match.num_tokens
        return found

    def _slice(self, source: Span, most_bytes: int) -> Span:
        """Return the first pages of a span, as many as `most_bytes` allow, at least one."""
        page_bytes = self._config.kinds.slot_bytes.get(KV, 0)
        if self._num_bytes(source) <= most_bytes or page_bytes * len(source.pages) <= most_bytes:
            return source
        return source.head(max(1, most_bytes // page_bytes), self._pools.cache.index.page_bytes)

    def _take(self, source: Span, most_pages: int) -> Span | None:
        """Take slots of the device that are promised to no request; None if there are too few."""
        spare = {kind.name: self._pools.num_unpromised(kind) for kind in self._pools.kinds}
        if len(source.pages) > most_pages or any(len(ids) > spare[name] for name, (ids, _) in source.kept.items()):
            return None
        prefix = source.prefix
        pin = self._pools.cache.pin_pages(prefix.key, source.start, prefix.namespace)  # not evicted for what follows it
        assert pin is not None, f"the device lacks the {source.start} pages in front of a load"
        try:
            return self.device.take(source)
        finally:
            self._pools.cache.unpin(pin)

    # -- steps --------------------------------------------------------------------------------------------------------

    def committed(self, plan: StepPlan, lost: Sequence[int]) -> None:
        """Record that a step has completed its copies, but for those whose numbers are in `lost`."""
        for copy in plan.host.stores:
            store = self._stores.pop(copy.number, None)
            if store is not None and copy.number in lost:
                store.tier.give_back(store.span)
                self.counters["tier_lost_stores"] += 1
            elif store is not None and store.tier.attach(store.span, f"{store.tier.name}_store"):
                self.counters["tier_stored_tokens"] += len(store.span.pages) * self._config.page_size
            if store is not None:
                self.retention.stored(store)
        for copy in plan.host.fetches:
            self._loaded(self._loads.pop(copy.number), lost=copy.number in lost)
        self._count_loading()

    def _count_loading(self) -> None:
        """Set the number of slots of each kind that loads in flight hold."""
        counts = Counter[str]()
        for load in self._loads.values():
            counts.update({kind: len(ids) for kind, ids in load.span.slots.items()})
        self._pools.num_loading = counts

    def _loaded(self, load: Load, *, lost: bool) -> None:
        span, was_dropped = load.span, load.pin is None
        self._unpin(load)
        if lost or was_dropped:
            self.device.give_back(span)
            if lost:
                self.counters["tier_lost_loads"] += 1
                load.tier.cache.discard(load.prefix.key, span.start, load.prefix.namespace)
            load.req.load_failed = True
        elif self.device.attach(span, f"{load.tier.name}_load"):
            _, pages = self.device.walk(span.prefix)
            ends = [kept.ends for name, kept in span.kept.items() if not self.device.parts[name].at_ends]
            changed = np.concatenate([NO_IDS, *ends]) - 1
            if len(changed):
                self._pools.draft.remap(pages[changed])
            num_tokens = len(span.pages) * self._config.page_size
            self.counters["tier_loaded_tokens"] += num_tokens
            load.req.loaded[load.tier.name] = load.req.loaded.get(load.tier.name, 0) + num_tokens
        else:
            load.req.load_failed = True

    def _unpin(self, load: Load) -> None:
        if load.pin is not None:
            for kind in load.tier.cache.kinds.resumed:
                kind.unlock(load.pin.node, load.match.pages)
            load.tier.cache.unpin(load.pin)
            load.pin = None

    def start_over(self) -> None:
        """Give up all copies that no committed step has made."""
        for store in self._stores.values():
            store.tier.give_back(store.span)
        self._stores.clear()
        for load in self._loads.values():
            self._unpin(load)
            self.device.give_back(load.span)
        self._loads.clear()
        self._count_loading()

    def clear(self) -> None:
        """Drop all that is stored. Copies in flight are dropped once their steps have completed."""
        self._stores.clear()
        for load in self._loads.values():
            load.pin = None
        for tier in self.all:
            tier.clear()

    # -- checking -----------------------------------------------------------------------------------------------------

    def holder(self, slots: Slots) -> Holder:
        """Return the slots of one pool of the device that loads in flight write."""
        spans = [load.span for load in self._loads.values()]
        ids: list[Ids] = [span.pages for span in spans if slots is self._pools.kv]
        for name, part in self.device.parts.items():
            ids += [span.kept[name].slots for span in spans if part.in_tree.slots is slots]
        return Holder(LOADING, np.concatenate([NO_IDS, *ids]))

    def audit(self) -> None:
        """Raise LedgerError, or fail an assertion, unless every slot of each tier has one holder (C8)."""
        for tier in self.all:
            spans = [store.span for store in self._stores.values() if store.tier is tier]
            pins = [load.pin for load in self._loads.values() if load.tier is tier and load.pin is not None]
            tier.cache.check(pins)
            nodes = [*tier.cache.index.nodes()]
            taken = Holder(LOADING, np.concatenate([NO_IDS, *(span.pages for span in spans)]))
            tier.kv.audit((taken, tier.cache.holder()))
            for kind in tier.cache.kinds.attached:
                ids = [span.kept[kind.name].slots for span in spans]
                kind.slots.audit((Holder(LOADING, np.concatenate([NO_IDS, *ids])), kind.cached(nodes)))


def _recorded(req: Request, span: Span) -> list[RecordedPicture]:
    """Return the pictures of a request of which the prefix of a span has tokens."""
    stop = len(span.prefix.key) // TOKEN_BYTES
    encodings = req.pictures.within(stop) if req.pictures is not None else ()
    return [RecordedPicture(each.first_id, each.digest, each.grid, each.key[3]) for each in encodings]


def _record(span: Span, pictures: list[RecordedPicture]) -> bytes:
    """Return the header of a span in a file, without checksums."""
    kinds = {KV: Rows([*range(span.start + 1, span.stop + 1)], 0, [])}
    kinds |= {name: Rows(kept.ends.tolist(), 0, []) for name, kept in span.kept.items()}
    prefix = span.prefix
    return msgspec.msgpack.encode(Record(prefix.namespace, prefix.tenant, prefix.key, span.start, kinds, pictures))
