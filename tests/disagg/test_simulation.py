"""The real workers, sides, sessions and movers under random faults, in virtual time (C22, C33).

A failure's note has the line that replays it.

More seeds: `python -m tests.disagg.simulation --seeds 0:1000 --jobs 2`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from tests.disagg.simulation import (
    BOOTSTRAP_S,
    LEASE_S,
    SILENCE_S,
    Outcome,
    Part,
    Weather,
    World,
    run_seed,
)
from tests.disagg.virtual import Net, replaced

PER_CHUNK = 12
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 100))]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_c22_c33_transfers_random_faults_each_ticket_ends_once_with_its_data_or_a_cause(chunk):
    outcomes = [run_seed(seed) for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)]
    outcome = sum(outcomes, Outcome(seeds=0))
    if chunk == 0:  # the traffic is of the kind that finds bugs; any twelve seeds need not be
        assert min(outcome.arrived, outcome.broken) >= outcome.offers // 5


@contextmanager
def calm_world(transport: str) -> Iterator[World]:
    """A world in which nothing happens by itself."""
    rng = Random(f"calm {transport}")
    net = Net(rng)
    with replaced(net):
        world = World(net, rng, transport)
        world.weather = Weather(offers=0.0)
        yield world


def holds_within(world: World, holds: Callable[[], bool], seconds: float) -> bool:
    """Whether `holds` becomes true within so many virtual seconds."""
    until = world.net.now + seconds
    while world.net.now < until and not holds():
        world.tick()
    return holds()


def offered(world: World) -> Part:
    """A ticket of the first decode instance that prefill has heard of."""
    decode = world.decodes[0]
    world.offer(decode)
    part = next(reversed(decode.parts.values()))
    assert holds_within(world, lambda: part.ticket.nonce in world.prefill.parts, 2 * SILENCE_S)
    return part


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c22_prefill_engine_that_takes_no_news_renews_no_lease(transport):
    with calm_world(transport) as world:
        world.prefill.deaf_until = world.net.now + 4 * LEASE_S
        decode = world.decodes[0]
        world.offer(decode)
        part = next(iter(decode.parts.values()))
        assert holds_within(world, lambda: "Renewed" in part.events, LEASE_S)
        holds_within(world, lambda: False, LEASE_S + SILENCE_S)
        count = len(part.events)
        holds_within(world, lambda: False, LEASE_S)
        assert len(part.events) == count


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c22_prefill_process_that_dies_for_good_closes_its_tickets(transport):
    with calm_world(transport) as world:
        part, start = offered(world), world._start
        world._start = lambda mode, place: world.prefill
        world._kill(0)
        world._start = start
        assert holds_within(world, lambda: part.is_over, BOOTSTRAP_S + SILENCE_S)
        assert part.events[-2:] == ["Broken", "Closed"]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c27_offer_without_a_prefill_process_ends_with_the_bootstrap_timeout(transport):
    with calm_world(transport) as world:
        world.prefill.process.alive = False
        world._fault("kill")
        decode = world.decodes[0]
        world.offer(decode)
        part = next(iter(decode.parts.values()))
        assert not holds_within(world, lambda: part.is_over, BOOTSTRAP_S / 2)
        assert holds_within(world, lambda: part.is_over, BOOTSTRAP_S)


def test_c22_shipment_that_stands_still_loses_its_lease():
    with calm_world("tcp") as world:
        part = offered(world)
        sent = world.prefill.parts[part.ticket.nonce]
        assert holds_within(world, lambda: sent.tail, 60.0)
        decode = world.decodes[0]
        decode.silent_until = world.net.now + LEASE_S + 3 * SILENCE_S
        world._fault("stall")
        assert holds_within(world, lambda: sent.is_over, 2 * LEASE_S + SILENCE_S)


def test_c22_stranger_cannot_end_or_fence_the_ticket_of_another_instance():
    with calm_world("shm") as world:
        part = offered(world)
        for _ in range(40):
            world._stranger()
            world.tick()
        assert holds_within(world, lambda: part.is_over, 60.0)
        assert "Arrived" in part.events
