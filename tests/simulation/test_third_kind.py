"""A third kind of cache, in one file: bytes per token beside full KV that must follow its pages, as the keys of an
indexer would. Nothing else knows it, and the simulator's traffic and faults find it right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.holding import Holding, Residency
from forebay.memory.kinds.build import make_kinds
from forebay.memory.kinds.kind import Kind
from forebay.memory.radix_node import Node
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import CACHE, PAD, Holder, Ids, Slots
from forebay.scheduler import residency
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import Simulation
from tests.simulation.workload import random_config, random_traffic

NOWHERE = -1


class IndexKeys(Kind):
    """Each page of full KV has a page of keys, its own for as long as it is not free."""

    name: ClassVar[str] = "keys"

    def __init__(self, config: SchedulerConfig, rows: ReqToTokenPool) -> None:
        self.slots = Slots("keys", config.num_pages, ledger=config.ledger)
        self.of_page: Ids = np.zeros(config.num_pages + 1, dtype=np.int64)
        self.positions = np.full((config.num_pages + 1, config.page_size), NOWHERE)  # what the device would hold
        self._rows = rows

    def take(self, pages: Ids, owners: int | Ids) -> None:
        self.of_page[pages] = self.slots.take_ids(len(pages), owners)

    def give_back(self, pages: Ids) -> Ids:
        ids = self.of_page[pages]
        self.of_page[pages] = PAD
        return ids

    def own(self, held: Residency) -> Ids:
        return self._rows.pages(held.row, held.pin.num_pages, held.num_pages)

    def admit(self, held: Residency, *args) -> None:
        self.take(self.own(held), held.id)

    def grow(self, pages: Ids, owners: Ids, *args) -> None:
        self.take(pages, owners)

    def attached(self, node: Node, owner: int) -> None:
        self.slots.transfer(self.of_page[node.pages], owner, CACHE)
        self.num_cached += len(node.pages)

    def removed(self, node: Node) -> None:
        self.num_cached -= len(node.pages)
        self.free(self.give_back(node.pages), CACHE)

    def let_go(self, pages: Ids) -> Holding:
        return Holding(self, self.give_back(pages))

    def leave(self, held: Residency) -> Holding:
        return self.let_go(self.own(held))

    def release(self, holding: Holding, owner: int) -> None:
        self.free(holding.ids, owner)

    def free(self, ids: Ids, owner: int) -> None:
        self.positions[ids] = NOWHERE
        self.slots.return_ids(ids, owner)

    def clear(self) -> None:
        self.slots.clear()
        self.of_page[:] = PAD
        self.positions[:] = NOWHERE
        self.num_cached = 0

    def holder(self, held: Residency) -> Holder:
        return Holder(held.id, self.of_page[self.own(held)])

    def cached(self, nodes: Iterable[Node]) -> Holder:
        return Holder(CACHE, np.concatenate([self.of_page[node.pages] for node in nodes] or [self.of_page[:0]]))


class Following(RetractingScheduler):
    """Each step finds the keys of all tokens before it where they were written, and writes those of its own."""

    def plan(self, now):
        plan = super().plan(now)
        (keys,) = (kind for kind in self.held.kinds if isinstance(kind, IndexKeys))
        for row, width, length in zip(plan.rows, plan.q_lens, plan.seq_lens, strict=True) if plan else ():
            at = np.arange(length)
            pages = self.held.rows.req_to_token[row, at // keys.positions.shape[1]]
            slots, offsets = keys.of_page[pages], at % keys.positions.shape[1]
            assert (keys.slots.owner[slots] == self.held.kv.owner[pages]).all(), "keys are not whose their pages are"
            before = slice(0, length - width)
            assert (keys.positions[slots, offsets] == at)[before].all(), "keys are not those of the tokens before"
            keys.positions[slots, offsets] = at
        return plan


def hits(seeds: range, kind: type[IndexKeys]) -> int:
    return sum(run(seed, kind).outcome().hits for seed in seeds)


def run(seed: int, kind: type[IndexKeys]) -> Simulation:
    rng = Random(seed)
    config = random_config(rng)
    # What is kept on the host comes back without keys: a plan's copies have no place for them yet.
    config = replace(config, state=replace(config.state, retraction_host_bytes=0))
    traffic = random_traffic(rng, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "make_kinds", lambda config, rows: (*make_kinds(config, rows), kind(config, rows)))
        sim = Simulation(config, traffic, rng, make_scheduler=Following)
    sim.run()
    return sim


SEEDS = 12


@pytest.mark.parametrize("seeds", [range(SEEDS), pytest.param(range(SEEDS, 300), marks=pytest.mark.slow)])
def test_a_kind_that_nobody_knows_follows_the_pages(seeds):
    assert hits(seeds, IndexKeys)


class Forgetful(IndexKeys):
    def grow(self, pages: Ids, owners: Ids, *args) -> None:
        pass


class Stuck(IndexKeys):
    """A row turns to pages of the cache, and its copies keep their keys."""

    def let_go(self, pages: Ids) -> Holding:
        return Holding(self)


@pytest.mark.parametrize("kind", [Forgetful, Stuck])
def test_a_kind_that_does_not_follow_is_found(kind):
    with pytest.raises(Exception, match=r"keys|slot|books"):
        hits(range(SEEDS), kind)
