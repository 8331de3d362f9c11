"""A third kind of cache, in one file: bytes per token beside full KV that must follow its pages, as the keys of an
indexer would, to the host and back too. Nothing else knows it, and the simulator's traffic and faults find it right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.holding import Allocation, Holding
from forebay.memory.kinds.build import make_kinds
from forebay.memory.kinds.kind import Kind, Kinds
from forebay.memory.radix_node import Node
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import CACHE, PAD, Holder, Ids, Slots
from forebay.requests.step_plan import HostWork, StepPlan
from forebay.scheduler.memory import pools
from forebay.scheduler.scheduler import NO_LIMIT
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import Simulation
from tests.simulation.workload import random_config, random_traffic, with_speculation

UNWRITTEN = -1


class IndexKeys(Kind):
    """Each page of full KV has a page of keys, its own for as long as it is not free."""

    name: ClassVar[str] = "keys"

    def __init__(self, config: SchedulerConfig, rows: ReqToTokenPool) -> None:
        self.slots = Slots("keys", config.num_pages, ledger=config.ledger)
        self.of_page: Ids = np.zeros(config.num_pages + 1, dtype=np.int64)
        self.positions = np.full((config.num_pages + 1, config.page_size), UNWRITTEN)  # what the device would hold
        self.taken: list[Ids] = []  # since the last plan: whoever had them before may have to be copied first
        self._rows = rows

    def take(self, pages: Ids, owners: int | Ids) -> None:
        self.of_page[pages] = ids = self.slots.take_ids(len(pages), owners)
        self.taken.append(ids)

    def give_back(self, pages: Ids) -> Ids:
        ids = self.of_page[pages]
        self.of_page[pages] = PAD
        return ids

    def own(self, held: Allocation) -> Ids:
        return self._rows.pages(held.row, held.pin.num_pages, held.num_pages)

    def admit(self, held: Allocation, *args: Any) -> None:
        self.take(self.own(held), held.id)

    def grow(self, pages: Ids, owners: Ids, *args: Any) -> None:
        self.take(pages, owners)

    def transfer_slots(self, held: Allocation, pages: Ids, start: int = 0) -> Ids:
        return self.of_page[pages[start:]]

    def attached(self, node: Node, owner: int) -> None:
        self.slots.transfer(self.of_page[node.pages], owner, CACHE)
        self.num_cached += len(node.pages)

    def removed(self, node: Node) -> None:
        self.num_cached -= len(node.pages)
        self.slots.return_ids(self.give_back(node.pages), CACHE)

    def release_pages(self, pages: Ids) -> Holding:
        return Holding(self, self.give_back(pages))

    def release_all(self, held: Allocation) -> Holding:
        return self.release_pages(self.own(held))

    def return_slots(self, holding: Holding, owner: int) -> None:
        self.slots.return_ids(holding.ids, owner)

    def clear(self) -> None:
        self.slots.clear()
        self.of_page[:] = PAD
        self.positions[:] = UNWRITTEN
        self.num_cached = 0

    def holder(self, held: Allocation) -> Holder:
        return Holder(held.id, self.of_page[self.own(held)])

    def cached(self, nodes: Iterable[Node]) -> Holder:
        return Holder(CACHE, np.concatenate([self.of_page[node.pages] for node in nodes] or [self.of_page[:0]]))


class Following(RetractingScheduler):
    """Each step finds the keys of all tokens before it where they were written, and writes those of its own, however
    many of them may count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_host: dict[int, Ids] = {}

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        plan = super().plan(now, width, mixed_limit)
        (keys,) = (kind for kind in self.pools.kinds if isinstance(kind, IndexKeys))
        if plan:
            self._copy(plan.host, keys)
        ends = [*plan.ends, *self.pools.table.kv_bound[plan.rows[plan.num_extends :]]] if plan else ()
        for row, width, length in zip(plan.rows, plan.q_lens, ends, strict=True) if plan else ():
            at = np.arange(length)
            pages = self.pools.rows.req_to_token[row, at // keys.positions.shape[1]]
            slots, offsets = keys.of_page[pages], at % keys.positions.shape[1]
            assert (keys.slots.owner[slots] == self.pools.kv.owner[pages]).all(), "keys are not whose their pages are"
            before = slice(0, length - width)
            assert (keys.positions[slots, offsets] == at)[before].all(), "keys are not those of the tokens before"
            keys.positions[slots, offsets] = at
        return plan

    def _copy(self, host: HostWork, keys: IndexKeys) -> None:
        for save in host.saves:
            self.on_host[save.request_id] = keys.positions[save.slots["keys"]]
        for request_id in host.drops:
            self.on_host.pop(request_id, None)
        for ids in keys.taken:
            keys.positions[ids] = UNWRITTEN
        keys.taken.clear()
        for load in host.loads:
            keys.positions[load.slots["keys"]] = self.on_host.pop(load.request_id)


def hits(seeds: range, kind: type[IndexKeys]) -> tuple[int, int]:
    """How many requests found something cached, and how many were copied to the host."""
    outcomes = [run(seed, kind).outcome() for seed in seeds]
    return sum(outcome.hits for outcome in outcomes), sum(outcome.offloaded for outcome in outcomes)


def run(seed: int, kind: type[IndexKeys]) -> Simulation:
    rng, widths = Random(seed), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    slot_bytes = {**config.kinds.slot_bytes, "keys": 20 * config.page_size}
    config = replace(config, kinds=replace(config.kinds, slot_bytes=slot_bytes))
    traffic = random_traffic(rng, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "make_kinds", lambda config, rows: Kinds((*make_kinds(config, rows), kind(config, rows))))
        sim = Simulation(config, traffic, rng, make_scheduler=Following, widths=widths)
    sim.run()
    return sim


SEEDS = 6


@pytest.mark.parametrize("seeds", [range(SEEDS), pytest.param(range(SEEDS, 300), marks=pytest.mark.slow)])
def test_a_kind_that_nobody_knows_follows_the_pages(seeds: range) -> None:
    assert min(hits(seeds, IndexKeys)) > 0


class Forgetful(IndexKeys):
    def grow(self, pages: Ids, owners: Ids, *args: Any) -> None:
        pass


class Stuck(IndexKeys):
    """A row turns to pages of the cache, and its copies keep their keys."""

    def release_pages(self, pages: Ids) -> Holding:
        return Holding(self)


class Homesick(IndexKeys):
    """Its keys stay where they are when a request's memory goes to the host."""

    def transfer_slots(self, held: Allocation, pages: Ids, start: int = 0) -> Ids:
        return self.of_page[pages[:0]]


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [Forgetful, Stuck, Homesick])
def test_a_kind_that_does_not_follow_is_found(kind: type[IndexKeys]) -> None:
    with pytest.raises(Exception, match=r"keys|slot|books"):
        hits(range(SEEDS), kind)
