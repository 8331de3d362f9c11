"""The real workers, sides, sessions and movers under random faults, in virtual time (C22, C33).

A failure's note has the line that replays it.

More seeds: `python -m tests.transfer.simulation --seeds 0:1000 --jobs 2`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from forebay.transfer.wire import frames
from tests.transfer.simulation import (
    BEAT_S,
    BOOTSTRAP_S,
    HOST,
    LEASE_S,
    PORT,
    SILENCE_S,
    Engine,
    Outcome,
    Part,
    Weather,
    World,
    run_seed,
)
from tests.transfer.virtual import SLOWEST_WRITE_S, Net, replaced

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


def offered(world: World, num_tokens: int = 0, decode: Engine | None = None) -> Part:
    """A ticket of `decode`, by default the first instance, that prefill has heard of."""
    decode = decode or world.decodes[0]
    world.offer(decode, num_tokens)
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
        for _ in range(8):  # later news do not make the oldest younger
            holds_within(world, lambda: False, (LEASE_S + SILENCE_S) / 8)
            world.offer(world.decodes[1])
        count = len(part.events)
        holds_within(world, lambda: False, LEASE_S)
        assert len(part.events) == count


def test_c22_prefill_engine_that_takes_news_renews_its_leases():
    with calm_world("tcp") as world:
        part = offered(world)
        world.prefill.send_some = lambda part: None
        for _ in range(3):
            count = len(part.events)
            holds_within(world, lambda: False, LEASE_S)
            assert len(part.events) >= count + LEASE_S / BEAT_S / 2


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


@pytest.mark.parametrize("stuck", ["prefill", "decode"])
def test_c22_shipment_that_stands_still_loses_its_lease(stuck):
    """Both engines live and beat, and no byte moves."""
    with calm_world("tcp") as world:
        part = offered(world)
        sent = world.prefill.parts[part.ticket.nonce]
        engine = world.prefill if stuck == "prefill" else world.decodes[0]
        engine.worker._data_thread._turn = lambda: None
        world._fault("hang")
        assert holds_within(world, lambda: sent.tail, 60.0)
        assert not holds_within(world, lambda: sent.code != "", LEASE_S - 1.0)
        assert holds_within(world, lambda: sent.code == part.code == "lease_timeout", 1.0 + SILENCE_S)


def test_c22_tail_is_sent_behind_the_last_piece():
    with calm_world("tcp") as world:
        part = offered(world)
        nonce = part.ticket.nonce
        world.prefill.worker._data_thread._turn = lambda: None
        world._fault("hang")
        assert holds_within(world, lambda: world.prefill.parts[nonce].tail, 60.0)
        assert not holds_within(world, lambda: world.decodes[0].worker._stage._receipts[nonce][1].tail, SILENCE_S)


def test_c22_shipment_that_moves_slowly_keeps_its_lease():
    """The prompt takes longer than a lease, and so do all its chunks together."""
    with calm_world("shm") as world:
        part = offered(world, num_tokens=12)
        sent = world.prefill.parts[part.ticket.nonce]
        world.prefill.deaf_until, world.net.slow = world.net.now + 2 * LEASE_S, 1.0
        assert holds_within(world, lambda: "Arrived" in part.events, 30 * LEASE_S), (part, sent)


def test_c22_one_sided_write_of_a_lost_session_ends_before_its_ticket_is_closed():
    with calm_world("shm") as world:
        part, net = offered(world, num_tokens=12), world.net
        sent = world.prefill.parts[part.ticket.nonce]
        net.slow = 1.0
        assert holds_within(world, lambda: bool(net.slowed_at), 10.0)
        for sock in net.sockets:
            net.cut(sock)
        world._fault("cut")
        until = net.slowed_at[-1] + SLOWEST_WRITE_S - 0.1
        assert not holds_within(world, lambda: part.is_over or sent.is_over, until - net.now)
        assert holds_within(world, lambda: part.is_over and sent.is_over, BOOTSTRAP_S)


def test_c22_lost_session_breaks_its_shipments_at_once():
    """Not when the lease of what was sent has ended."""
    with calm_world("shm") as world:
        part, start = offered(world), world._start
        sent = world.prefill.parts[part.ticket.nonce]
        world._start = lambda mode, place: world.decodes[0]
        world._kill(1)
        world._start = start
        assert holds_within(world, lambda: sent.code != "", SILENCE_S + 0.5)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c22_session_that_ends_at_any_moment_of_its_beginning_is_begun_anew(transport):
    """Weights that change end sessions; nothing of the first stays, and what was offered in it ends."""
    for ticks in range(24):
        with calm_world(transport) as world:
            decode = world.decodes[0]
            world.offer(decode)
            for _ in range(ticks):
                world.tick()
            decode.worker.weights_changed(None, 0)
            world._fault("cut")
            part = next(iter(decode.parts.values()))
            world.drain()
            assert max(decode.sessions) >= 2
            assert part.code != "bootstrap_timeout", "what had no session has the next one"


def test_c31_layout_with_new_weights_is_of_the_next_session():
    with calm_world("tcp") as world:
        offered(world)
        world.decodes[0].worker.weights_changed(None, 7)
        world._fault("cut")
        world._fault("mismatch")
        part = world.decodes[0].parts[next(iter(world.decodes[0].parts))]
        assert holds_within(world, lambda: part.is_over, 60.0)
        world.offer(world.decodes[0])
        part = [*world.decodes[0].parts.values()][-1]
        assert holds_within(world, lambda: part.code == "layout_mismatch", BOOTSTRAP_S)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c22_offer_that_prefill_has_no_room_for_is_fenced(transport, monkeypatch):
    with calm_world(transport) as world:
        monkeypatch.setattr(frames, "MAX_TICKETS", 0)
        world._fault("crowd")
        decode = world.decodes[0]
        world.offer(decode)
        part = next(iter(decode.parts.values()))
        assert holds_within(world, lambda: part.is_over, SILENCE_S)
        assert (part.code, world.prefill.parts) == ("invalid_offer", {})


def test_c22_peers_of_two_machines_share_no_memory():
    with calm_world("shm") as world:
        decode = world.decodes[0]
        for engine in world.engines:
            engine.worker._engine.transports = ["shm", "tcp"]
        decode.worker._engine.machine = "there"
        offered(world)
        offered(world, decode=world.decodes[1])
        assert [one.worker.transport(HOST, PORT) for one in world.decodes] == ["tcp", "shm"]


def test_c33_transport_that_decode_has_not_named_ends_the_session():
    with calm_world("shm") as world:
        decode = world.decodes[0]
        world._fault("mismatch")
        world.offer(decode)
        part = next(iter(decode.parts.values()))
        assert holds_within(world, lambda: bool(world.prefill.sessions), BOOTSTRAP_S)
        decode.worker._engine.transports = ["tcp"]
        assert holds_within(world, lambda: part.code == "layout_mismatch", BOOTSTRAP_S)


@pytest.mark.parametrize("name", ["_on_landed", "on_wrote"])
def test_c33_exception_at_a_report_ends_the_session_of_its_ticket_and_is_logged(name, monkeypatch, caplog):
    """And not the thread: what is offered next arrives."""
    with calm_world("tcp") as world:
        part, sides = offered(world), [engine.worker._stage for engine in world.engines]
        sides.append(world.prefill.worker._stage._shipments)
        side = next(side for side in sides if hasattr(side, name))

        def fails(report: object) -> None:
            raise MemoryError("no room")

        world._fault("bug")
        world._fault("cut")
        monkeypatch.setattr(side, name, fails)
        assert holds_within(world, lambda: part.is_over, 60.0)
        monkeypatch.undo()
        world.drain()
        assert part.code in ("peer_rejected", "peer_lost")
    assert any(line.startswith("peer_failed ") and "no room" in line for line in caplog.messages)


def test_worker_order_behind_its_end_is_carried_out():
    """Whoever was at something beside it closes what it made."""
    with calm_world("tcp") as world:
        worker, done = world.decodes[0].worker, []
        worker.close()
        worker._loop.call(lambda: done.append(1))
        assert done == [1]


def test_c22_stranger_cannot_end_or_fence_the_ticket_of_another_instance():
    with calm_world("shm") as world:
        part = offered(world)
        for _ in range(40):
            world._stranger()
            world.tick()
        assert holds_within(world, lambda: part.is_over, 60.0)
        assert "Arrived" in part.events
