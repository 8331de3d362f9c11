"""The memory of one engine, and what becomes of it as steps are launched, commit and fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.miss_reason import NEVER_REUSED, MissReason
from forebay.memory.slots import NO_OWNER, Ids
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan
from forebay.scheduler.memory.allocator import Allocator, Prefixes
from forebay.scheduler.memory.deferred import TransferSlots
from forebay.scheduler.memory.host_copies import HostCopies
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.memory.tiers import Tiers
from forebay.scheduler.step_draft import StepDraft


class EngineMemory:
    """The pools, and the parts that work on them: `allocator` for requests, `prefixes` for the prefix cache with other
    `tiers` behind it, and `host_copies` of retracted requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pools = Pools(config)
        self.host_copies = HostCopies(config.kinds)
        self.tiers = Tiers(self.pools, config)
        self.prefixes = Prefixes(self.pools, self.tiers, reuse=config.radix_cache)
        self.allocator = Allocator(self.pools, self.prefixes, self.host_copies)

    def computes_for(self, req: Request) -> bool:
        """Return whether a step in flight still computes for a waiting request, or copies its memory to the host."""
        steps, made_by = self.pools.steps, self.host_copies.made_by(req.id)
        return req.resume_after > steps.committed or steps.committed < made_by <= steps.launched

    def record_reuse(self, req: Request) -> None:
        """Record what a request that ends has reused of the prefix cache, and what it would have with more memory."""
        pools, report = self.pools, req.cache_report
        if pools.ghosts is None or report is None or not req.num_output or report.miss_reason in NEVER_REUSED:
            return
        pools.ghosts.record(
            req.tokens[:-1],  # the last one has no KV
            req.num_prompt,
            namespace=req.cache_namespace,
            tenant=req.tenant,
            reused=report.cached_tokens,
            used_pages=pools.kv.capacity - pools.kv.num_free - pools.cache.num_pages,
        )

    def launch(self, decodes: Ids, admitted: Sequence[Request]) -> StepPlan:
        """Freeze the draft, with decodes in these rows, into the plan of a step, and begin the next draft."""
        pools, draft = self.pools, self.pools.draft
        for kind in pools.kinds.decoded if len(decodes) else ():
            kind.decode(pools.table, decodes, pools.steps.committed, draft)
        plan = draft.freeze(decodes, admitted, pools.kinds)
        pools.steps.launched = draft.step
        pools.draft = StepDraft(draft.step + 1, pools.rows, pictures=pools.pictures)
        for holding in draft.reads:
            pools.deferred.free_holding(holding, NO_OWNER)
        return plan

    def commit(
        self,
        plan: StepPlan,
        ends: Sequence[int],
        num_new: Sequence[int] | None,
        totals: Mapping[str, Ids] | None = None,
        lost: Sequence[int] = (),
    ) -> bool:
        """Record that a step has completed, as all before it, and free what only it could still write. Return whether
        it had decodes alone, and loaded tokens into hot buffers.

        `ends` are the lengths up to which it computed prompts. `num_new` ends with the number of new tokens of each
        decode; without it, each decode has one. `totals` are what kinds of cache counted on the device, by kind, and
        `lost` the numbers of copies of other tiers that failed."""
        pools, num = self.pools, plan.num_extends
        decodes = plan.rows[num:]
        if num:
            pools.table.commit(plan.rows[:num], np.array(ends, dtype=np.int64))
        if len(decodes):
            counts = np.array(num_new[-len(decodes) :] if num_new else [1] * len(decodes), dtype=np.int64)
            pools.table.settle(decodes, plan.q_lens[num:] - 1, counts)
        pools.steps.committed = plan.step
        if pools.pictures is not None:
            for encode in plan.pictures.encodes:
                pools.pictures.committed(plan.step, encode.picture, encode.tile, encode.last_layer)
        if pools.deferred.entries:
            pools.deferred.drain()
        if plan.host.stores or plan.host.fetches:
            self.tiers.committed(plan, lost)
        return pools.count(totals) and not num if totals else False

    def start_over(self, reqs: Iterable[Request], ended: Iterable[Request], void: Sequence[StepPlan]) -> None:
        """Release what all requests hold: of `reqs` the cache adopts what completed steps wrote, of `ended` nothing.
        The plans `void`, all those in flight, and the changes drafted since do not count."""
        for req in reqs:
            self.allocator.release(req, req.allocation.kv_committed)
        for req in ended:
            self.allocator.release(req)
        pools, reads = self.pools, self.pools.draft.reads
        self._renew_draft(void, pools.steps.committed)
        pools.steps.committed = pools.steps.launched
        pools.deferred.drain()
        for holding in reads:
            holding.kind.return_slots(holding, NO_OWNER)
        for kind in pools.kinds.restarted:
            kind.start_over(pools.draft)

    def _renew_draft(self, void: Sequence[StepPlan], committed: int) -> None:
        """Discard the changes of the steps of `void`, and those drafted since."""
        pools = self.pools
        self.tiers.start_over()
        drops = self.host_copies.start_over([*(plan.host for plan in void), pools.draft], committed)
        if pools.pictures is not None:
            pools.pictures.start_over(number for plan in void for number in plan.pictures.drops)
        pools.draft = StepDraft(pools.steps.launched + 1, pools.rows, drops, pictures=pools.pictures)

    def clear(
        self,
        void: Sequence[StepPlan],
        in_transfer: TransferSlots | None = None,
        *,
        committed: int = -1,
        released: bool = False,
    ) -> None:
        """Free all slots and drop the prefix cache, whatever the ledgers say; no request holds anything, and the plans
        `void`, all those in flight, do not count.

        Slots `in_transfer`, which other engines may access, stay out of use. Host copies of steps up to `committed`
        stay. With `released`, later misses report that the cache was released, and other tiers stay."""
        self._renew_draft(void, committed)
        if not released:
            self.tiers.clear()
        self.pools.steps.committed = self.pools.steps.launched
        self.pools.clear(released=released)
        if in_transfer:
            self.pools.deferred.reserve(in_transfer)

    def keep_cached(self) -> dict[str, Ids]:
        """Reset as `clear` does, but for the prefix cache, and return the slots that it has, by kind. No request holds
        anything.

        The least useful part is evicted first, until copies of the rest fit into host memory."""
        pools, copies = self.pools, self.host_copies
        kinds = {pools.kv.name: 1, **{kind.name: int(kind.of_pages) for kind in pools.kinds}}
        page_bytes = copies.bytes_of(kinds)
        while (excess := copies.bytes_of(pools.num_cached) - copies.room) > 0:
            num_pages = 1 if self.prefixes.at_ends else max(1, excess // page_bytes)
            evicted = pools.cache.evict(num_pages, MissReason.RELEASED)
            assert evicted, f"{pools.cache.num_pages} cached pages are pinned, and no request runs"
        self.start_over([], [], [])
        if pools.pictures is not None:
            pools.pictures.clear()
        pools.table.clear()
        return pools.cached()
