"""When sessions end, whom they take with them, and how many there may be, in virtual time (C22, C33)."""

from __future__ import annotations

import os
import selectors
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from forebay.base.errors import EngineError, WireError
from forebay.config.engine_config import Chaos
from forebay.requests.pieces import Piece, chunk_of
from forebay.transfer.session import connection, data_thread, peers, prefill
from forebay.transfer.session.decode import Peer
from forebay.transfer.transports.tcp import TcpWriter
from forebay.transfer.wire import frames
from forebay.transfer.wire.faults import Faults
from tests.transfer.simulation import BEAT_S, BOOTSTRAP_S, HOST, LEASE_S, PORT, SILENCE_S, Engine, World
from tests.transfer.test_simulation import calm_world, holds_within, offered
from tests.transfer.virtual import OneSided


def session_of(decode: Engine):
    return next(iter(decode.worker._stage._peers.values())).session


def sends_nothing(world: World) -> None:
    world.prefill.send_some = lambda part: None


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_c22_peer_that_is_silent_is_lost_by_the_other(silent):
    with calm_world("tcp") as world:
        part = offered(world)
        sent = world.prefill.parts[part.ticket.nonce]
        sends_nothing(world)
        engine, other = (world.prefill, part) if silent == "prefill" else (world.decodes[0], sent)
        engine.silent_until = world.net.now + 9 * LEASE_S
        world._fault("stall")
        assert holds_within(world, lambda: other.code == "heartbeat_timeout", SILENCE_S + 0.5)


def test_c22_session_is_lost_once():
    """What ends the first a second time leaves its successor alone."""
    with calm_world("tcp") as world:
        offered(world)
        decode = world.decodes[0]
        first = session_of(decode)
        world._fault("cut")
        first.lose(frames.peer_lost("there", "why"))
        world.offer(decode)
        assert holds_within(world, lambda: bool(session_of(decode) and session_of(decode).is_joined), BOOTSTRAP_S)
        second = session_of(decode)
        first.lose(frames.peer_lost("there", "why"))
        assert session_of(decode) is second


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names of the events that were logged."""
    return [record.getMessage().partition(" ")[0] for record in caplog.records]


def test_session_is_one_log_line_at_each_side_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", "forebay"), calm_world("tcp") as world:
        offered(world)
        assert sorted(events(caplog)) == ["decode_joined", "prefill_joined"]
        assert any("transport=tcp" in record.getMessage() for record in caplog.records)
        caplog.clear()
        world._fault("cut")
        session_of(world.decodes[0]).lose(frames.peer_lost("there", "cable"))
        assert holds_within(world, lambda: not world.prefill.sessions, SILENCE_S)
        lost = [record for record in caplog.records if record.levelname == "WARNING"]
        assert sorted(record.getMessage().partition(" ")[0] for record in lost) == ["decode_lost", "prefill_lost"]
        assert all("code=peer_lost" in record.getMessage() for record in lost)
        assert any("cable" in record.getMessage() for record in lost)


def test_c22_connection_of_chunks_that_ends_ends_the_session():
    """At once, and not when the next chunk is missed."""
    with calm_world("tcp") as world:
        part = offered(world)
        sends_nothing(world)
        (reader,) = world.decodes[0].worker._data_thread.receiver.readers.values()
        world._fault("cut")
        world.net.cut(reader.sock)
        assert holds_within(world, lambda: part.code == "peer_lost", 0.5)


def test_c33_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(prefill, "MAX_SESSIONS", 1)
    with calm_world("tcp") as world:
        offered(world)
        world._fault("cut")
        world.offer(world.decodes[1])
        assert not holds_within(world, lambda: len(world.prefill.sessions) > 1, BOOTSTRAP_S / 2)


def test_c33_remembered_epochs_are_bounded(monkeypatch):
    monkeypatch.setattr(prefill, "MAX_KNOWN", 1)
    with calm_world("tcp") as world:
        for decode in world.decodes:
            offered(world, decode=decode)
        assert [*world.prefill.worker._stage._epochs] == [world.decodes[1].worker.instance]


def test_c33_strangers_are_bounded_and_time_out(monkeypatch, caplog):
    monkeypatch.setattr(prefill, "MAX_STRANGERS", 2)
    with calm_world("tcp") as world:
        guests = world.prefill.worker._stage._guests
        for _ in range(4):
            world.net.connect((HOST, PORT), 1.0)
        holds_within(world, lambda: not world.net.listeners[HOST, PORT].coming, 1.0)
        assert len(guests) == 2
        assert not holds_within(world, lambda: not guests, BOOTSTRAP_S - 1.0)
        assert holds_within(world, lambda: not guests, 1.5)
    assert events(caplog).count("connection_refused") == 4


@pytest.mark.parametrize("machine", ["here", "there"])
def test_c22_process_of_another_machine_has_no_number_here(machine):
    with calm_world("shm") as world:
        decode, asked = world.decodes[0], []

        class Far(OneSided):
            one_machine = False

            def reach(self, pid):
                asked.append(pid)
                return super().reach(pid)

        for engine in world.engines:
            engine.worker._engine.transports = ["far"]
            engine.worker._engine.one_sided["far"] = Far(world.net, engine.memory, engine.process)
        decode.worker._engine.machine = machine
        offered(world)
        assert asked == [os.getpid() if machine == "here" else 0]


def test_c33_chunk_of_another_size_than_its_places_is_read_beside_them():
    with calm_world("tcp") as world:
        part = offered(world, num_tokens=4)
        sends_nothing(world)
        moves, span = world.decodes[0].worker._data_thread, part.spans["state"]
        piece = Piece("state", 0, 1, 0, 1, span.ids)
        moves.receiver._memory.parts = lambda piece: [memoryview(bytearray(16))]  # as of a run that is long enough
        assert moves.receiver.target(chunk_of(part.ticket.nonce, piece, 16, 0))
        assert not moves.receiver.target(chunk_of(part.ticket.nonce, piece, 15, 0))
        assert not moves.receiver.target(chunk_of(bytes(16), piece, 16, 0))


def test_c22_write_to_a_session_that_is_over_is_no_failure():
    with calm_world("tcp") as world:
        moves, reports = world.prefill.worker._data_thread, []
        moves._report = moves.sender._report = reports.append
        piece = Piece("state", 0, 1, 0, 1, np.array([1]))
        moves.submit(data_thread.Write(99, bytes(16), [piece], [np.array([1])]))
        moves._turn()
        assert reports == []


def test_c22_frame_of_a_session_before_it_is_joined_ends_it():
    with calm_world("tcp") as world:
        world._stranger()
        assert holds_within(world, lambda: bool(world.prefill.sessions), 1.0)
        offering = frames.Offering(nonce=bytes(16), room=1, num_tokens=4, digest=b"", start=0, places={})
        world.strangers[0].send(offering)
        assert holds_within(world, lambda: not world.prefill.sessions, 1.0)


def test_c22_decode_connects_again_a_quarter_of_a_beat_later():
    with calm_world("tcp") as world:
        decode, attempts = world.decodes[0], []
        connect = world.net.connect

        def counted(address, timeout):
            attempts.append(world.net.now)
            return connect(address, timeout)

        peers.socket.create_connection = counted
        world.prefill.process.alive = False
        world._fault("kill")
        decode.worker._period_s = 0.0
        world.offer(decode)
        holds_within(world, lambda: False, 2 * BEAT_S)
        assert 2 <= len(attempts) <= 9


@pytest.mark.parametrize("ended", ["worker", "mover"])
def test_worker_of_which_a_thread_has_ended_raises(ended):
    with calm_world("tcp") as world:
        worker = world.prefill.worker
        (worker._loop if ended == "worker" else worker._data_thread)._thread.is_alive = lambda: False
        with pytest.raises(EngineError) as raised:
            worker.poll()
        assert raised.value.code == "transfers_ended"


def test_c22_ticket_of_which_all_is_there_lands_at_once():
    with calm_world("tcp") as world:
        moves, reports = world.decodes[0].worker._data_thread, []
        moves.receiver._report = reports.append
        moves.submit(data_thread.Expect(bytes(16), SimpleNamespace(is_complete=True)))
        moves._turn()
        assert reports == [data_thread.Landed(bytes(16), 0.0)]


def test_c33_peer_that_settles_before_all_was_sent_is_not_believed():
    with calm_world("tcp") as world:
        part = offered(world)
        sends_nothing(world)
        session_of(world.decodes[0]).send(frames.Settled(part.ticket.nonce))
        holds_within(world, lambda: False, 1.0)
        assert world.prefill.parts[part.ticket.nonce].events == []


def test_c33_ticket_that_is_offered_twice_ends_its_session():
    with calm_world("tcp") as world:
        part = offered(world)
        sends_nothing(world)
        again = frames.Offering(nonce=part.ticket.nonce, room=1, num_tokens=4, digest=bytes(16), start=0, places={})
        world._fault("cut")
        session_of(world.decodes[0]).send(again)
        events = world.prefill.parts[part.ticket.nonce].events
        assert holds_within(world, lambda: "Broken" in events, SILENCE_S)


def test_c22_fence_of_a_ticket_that_nobody_broke_closes_nothing():
    with calm_world("tcp") as world:
        part = offered(world)
        sends_nothing(world)
        session = session_of(world.decodes[0])
        session._user.on_session_frame(session, frames.Fenced(part.ticket.nonce))
        assert not holds_within(world, lambda: "Closed" in part.events, BEAT_S)


def test_c22_engine_of_a_new_session_is_not_taken_for_asleep():
    with calm_world("tcp") as world:
        offered(world)
        peer = next(iter(world.decodes[0].worker._stage._peers.values()))
        peer.rests = True
        world._fault("cut")
        peer.session.lose(frames.peer_lost("there", "why"))
        assert not peer.rests


def test_c22_session_that_nobody_joins_is_over_in_time():
    with calm_world("tcp") as world:
        decode = world.decodes[0]
        world.prefill.silent_until = world.net.now + 9 * LEASE_S
        world._fault("stall")
        world.offer(decode)
        assert holds_within(world, lambda: bool(decode.sessions), BOOTSTRAP_S / 2)
        first = session_of(decode)
        assert holds_within(world, lambda: session_of(decode) is not first, 2 * BOOTSTRAP_S)


def test_c22_session_is_over_with_its_connection_of_chunks_at_prefill_too():
    with calm_world("tcp") as world:
        offered(world)
        sends_nothing(world)
        (number,) = world.prefill.sessions
        world._fault("cut")
        world.prefill.worker._stage.on_chunks_lost(data_thread.Lost(number, "why"))
        assert number not in world.prefill.sessions


def test_c22_new_session_of_an_engine_ends_its_old_one(monkeypatch):
    """Whose connection nobody has closed yet, so that it counts as one more."""
    monkeypatch.setattr(prefill, "MAX_SESSIONS", 1)
    with calm_world("shm") as world:
        offered(world)
        decode = world.decodes[0]
        first = session_of(decode)
        first._links[0].close = lambda: None
        world._fault("cut")
        first.lose(frames.peer_lost("there", "why"))
        world.offer(decode)
        assert holds_within(world, lambda: bool(session_of(decode) and session_of(decode).is_joined), SILENCE_S / 2)
        assert len(world.prefill.worker._loop.users) == len(world.prefill.sessions) == 1


class FullSocket:
    """Takes nothing until it `is_free`."""

    is_free = False

    def sendmsg(self, parts):
        if not self.is_free:
            raise BlockingIOError
        return sum(map(len, parts))

    def fileno(self):
        return -1

    def close(self):
        pass


@pytest.mark.parametrize("ends", ["sent", "session"])
def test_c22_places_that_a_connection_sends_from_are_held_until_it_has_ended(ends):
    """A long run of places is sent without a copy."""
    with calm_world("tcp") as world:
        moves, reports, sock = world.prefill.worker._data_thread, [], FullSocket()
        moves.sender._report = reports.append
        memory = SimpleNamespace(parts=lambda piece: [memoryview(bytes(16))], num_bytes=lambda piece: 16)
        encoder = SimpleNamespace(encode=lambda frame: b"frame")
        writer = TcpWriter(sock, encoder, memory, None, Faults(Chaos(), lambda: 0.0))
        moves.submit(data_thread.AddWriter(99, writer))
        moves.submit(data_thread.Write(99, bytes(16), [Piece("state", 0, 1, 0, 1, np.array([1]))], [np.array([1])]))
        for job in (None, data_thread.Drop(bytes(16)), None):
            if job:
                moves.submit(job)
            moves._turn()
        assert reports == []
        sock.is_free = ends == "sent"
        if ends == "session":
            moves.submit(data_thread.EndSession(99))
        moves._turn()
        assert reports[-1] == data_thread.Dropped(bytes(16))


def test_c22_lost_session_reads_no_more_chunks():
    """Its peer may hang, with the connection open."""
    with calm_world("tcp") as world:
        offered(world)
        sends_nothing(world)
        decode = world.decodes[0]
        world._fault("stall")
        world.prefill.silent_until = world.net.now + 9 * LEASE_S
        session = session_of(decode)
        session.lose(frames.peer_lost("there", "why"))
        assert holds_within(world, lambda: session.epoch not in decode.worker._data_thread.receiver.readers, 0.5)


def test_c27_peer_that_cannot_be_reached_is_forgotten():
    """And what was to be told to it, too."""
    with calm_world("tcp") as world:
        decode = world.decodes[0]
        world.prefill.process.alive = False
        world._fault("kill")
        world.offer(decode)
        assert holds_within(world, lambda: bool(decode.worker._stage._peers), 1.0)
        assert holds_within(world, lambda: not decode.worker._stage._peers, BOOTSTRAP_S + 1.0)


def test_c33_frames_behind_the_end_of_a_link_are_not_handled():
    with calm_world("tcp") as world:
        loop, seen, two = world.decodes[0].worker._loop, [], [frames.Beat(), frames.Beat()]

        class Talker:
            def receive(self):
                return iter(two)

        def on_frame(talker, frame):
            seen.append(frame)
            del loop.users[talker]

        talker, user = Talker(), SimpleNamespace(on_frame=on_frame)
        loop.users[talker] = user
        loop._talk(talker, selectors.EVENT_READ)
        assert len(seen) == 1


def test_c33_peer_that_reads_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 1 << 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        end = connection.Connection(ours, "there", lambda: 0.0, Chaos())
        end.encoder = SimpleNamespace(encode=lambda frame: bytes(1 << 16))

        def send_much():
            for _ in range(200):
                end.send(frames.Beat())

        with pytest.raises(connection.ConnectionLost, match="bytes unread"):
            send_much()


def test_c22_session_is_joined_by_one_connection_of_chunks():
    with calm_world("tcp") as world:
        offered(world)
        side = world.prefill.worker._stage
        (session,) = side._sessions.values()
        with pytest.raises(WireError, match="waits for a connection of chunks"):
            side._attach(session.link, session.hello)


def test_c22_offer_to_an_engine_that_is_asleep_breaks_at_once():
    with calm_world("tcp") as world:
        offered(world)
        decode = world.decodes[0]
        next(iter(decode.worker._stage._peers.values())).rests = True
        world._fault("rest")
        world.offer(decode)
        part = next(reversed(decode.parts.values()))
        assert holds_within(world, lambda: "Broken" in part.events, BEAT_S)


def test_c22_lost_connection_of_chunks_ends_its_session_and_no_other():
    lost = []
    with calm_world("tcp") as world:
        side = world.decodes[0].worker._stage
        side._peers = {
            epoch: peer_of(SimpleNamespace(epoch=epoch, where="there", lose=lambda failure, n=epoch: lost.append(n)))
            for epoch in (1, 2, 3)
        }
        side.on_chunks_lost(data_thread.Lost(2, "why"))
        side._peers = {}
    assert lost == [2]


def peer_of(session):
    return SimpleNamespace(session=session)


def test_c33_ticket_that_cannot_be_handled_ends_decodes_session():
    with calm_world("tcp") as world:
        part = offered(world)
        session = session_of(world.decodes[0])
        world._fault("cut")
        world.decodes[0].worker._stage.lose_ticket(part.ticket.nonce, frames.peer_lost("there", "why"))
        assert session._is_over


def test_c22_broken_ticket_whose_places_nobody_else_writes_to_is_fenced_at_once():
    with calm_world("tcp") as world:
        part = offered(world)
        sends_nothing(world)
        side = world.decodes[0].worker._stage
        world._fault("cut")
        side.lose_ticket(part.ticket.nonce, frames.peer_lost("there", "why"))
        assert side.num_unfenced == 0


def test_c22_only_tickets_that_broke_are_fenced(monkeypatch):
    sent, send = [], peers.SessionWithDecode.send
    monkeypatch.setattr(
        peers.SessionWithDecode, "send", lambda session, frame: (sent.append(frame), send(session, frame))
    )
    with calm_world("tcp") as world:
        part = offered(world)
        assert holds_within(world, lambda: "Closed" in part.events, LEASE_S)
        assert holds_within(world, lambda: not world.prefill.worker._stage._shipments.open, LEASE_S)
    assert [type(frame) for frame in sent if isinstance(frame, frames.Completed | frames.Fenced)] == [frames.Completed]


def test_c22_decode_sends_one_beat_in_its_time():
    with calm_world("tcp") as world:
        offered(world)
        session, sent = session_of(world.decodes[0]), []
        session.send = sent.append
        for _ in range(3):
            session.tick(world.net.now + BEAT_S)
        assert sent == [frames.Beat()]


def test_prefill_that_ends_closes_the_connections_of_strangers():
    closed = []

    class Stranger:
        def close(self):
            closed.append(self)

    with calm_world("tcp") as world:
        side = world.prefill.worker._stage
        side._guests[Stranger()] = None
        side.close()
        side._guests.clear()
        assert len(closed) == 1


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_c22_prefill_joins_a_session_once(transport):
    with calm_world(transport) as world:
        offered(world)
        side = world.prefill.worker._stage
        (session,) = side._sessions.values()
        with pytest.raises(WireError):
            session.on_frame(session.link, frames.Invite(b"address"))
        assert len(session_of(world.decodes[0])._links) == 1, "the mover has the connection of chunks"


def test_c33_engines_that_were_heard_of_last_are_remembered(monkeypatch):
    monkeypatch.setattr(prefill, "MAX_KNOWN", 2)
    with calm_world("tcp") as world:
        side = world.prefill.worker._stage
        side._epochs.clear()
        for instance in ("first", "second", "first", "third"):
            side._remember(SimpleNamespace(instance=instance, epoch=1))
        assert [*side._epochs] == ["first", "third"]


def test_c27_peer_to_whom_something_is_yet_to_be_said_is_remembered():
    engine = SimpleNamespace(options=SimpleNamespace(cluster_key=b""))
    for unsent in ([(0.0, frames.Beat())], []):
        known = {}
        known[HOST, PORT] = peer = Peer(engine, None, None, known, (HOST, PORT), iter(()))
        peer.unsent = unsent
        peer.forget()
        assert bool(known) == bool(unsent)
