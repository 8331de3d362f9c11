"""The ring that carries the log to the ranks, and their outcomes back."""

from __future__ import annotations

import os
import threading
from random import Random

import pytest

from forebay.engine.ranks.outcome import DONE, Outcome, RankLost
from forebay.engine.ranks.ring import RecordTooLarge, RingWriter
from tests.deadlines import HANGS_S
from tests.engine.ranks.rings import ring


@pytest.mark.parametrize("seed", range(3))
def test_ring_records_of_random_lengths_arrive_whole_at_each_rank(seed):
    rng = Random(seed)
    sent = [rng.randbytes(rng.choice([1, 17, 300, 1000])) for _ in range(200)]
    got: list[list[bytes | None]] = [[], []]
    with ring(num_ranks=2, num_bytes=1000) as made:

        def follow(rank: int) -> None:
            for number in range(len(sent)):
                got[rank].append(made.readers[rank].read())
                made.readers[rank].done(number, DONE)

        threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for record in sent:
            made.writer.send(record)
        assert made.writer.outcomes(len(sent) - 1) == [DONE, DONE]
        for thread in threads:
            thread.join(HANGS_S)
    assert got == [sent, sent]


def test_ring_full_waits_for_the_slowest_rank():
    with ring(num_ranks=2, num_bytes=100) as made:
        made.writer.send(bytes(60))
        made.readers[0].done(0, DONE)
        sender = threading.Thread(target=made.writer.send, args=(bytes(60),), daemon=True)
        sender.start()
        assert made.readers[1].read() == bytes(60)
        assert not made.readers[1].is_ready
        made.readers[1].done(0, DONE)
        sender.join(HANGS_S)
        assert made.readers[1].read() == bytes(60)


def test_ring_working_ranks_are_those_with_an_entry_that_has_no_limit() -> None:
    with ring(num_ranks=2) as made:
        made.writer.send(b"step")
        assert made.writer.working() == []
        made.writer.send(b"update", limited=False)
        assert made.writer.working() == [1, 2]
        for number in range(2):
            made.readers[0].done(number, DONE)
        made.writer.stalled_s()  # takes in what has arrived
        assert made.writer.working() == [2]
        for number in range(2):
            made.readers[1].done(number, DONE)
        assert made.writer.outcomes(1) == [DONE, DONE]
        assert made.writer.working() == []


def test_ring_outcomes_of_earlier_entries_are_dropped():
    failed, error = Outcome(failed=(3, 300)), Outcome(error="RuntimeError: " + "x" * 5000, more=True)
    with ring() as made:
        for number, outcome in enumerate([failed, DONE, error]):
            made.writer.send(b"entry")
            made.readers[0].done(number, outcome)
        assert made.writer.outcomes(0) == [failed]
        assert made.writer.outcomes(2) == [error]


def test_ring_record_that_is_longer_than_the_ring_is_refused_with_both_sizes():
    with ring(num_bytes=100) as made:
        with pytest.raises(RecordTooLarge, match=r"101 bytes .* at most 100"):
            made.writer.send(bytes(101))
        assert not made.readers[0].is_ready


def test_ring_rank_that_has_ended_is_lost_to_who_waits_and_to_who_sends():
    with ring(num_ranks=2) as made:
        made.writer.send(b"entry")
        made.end(2)
        made.readers[0].done(0, DONE)
        with pytest.raises(RankLost, match="rank 2 has ended"):
            made.writer.outcomes(0)
        with pytest.raises(RankLost, match="rank 2 has ended"):
            made.writer.send(b"another")


def test_ring_outcome_out_of_order_is_lost_with_both_numbers():
    with ring() as made:
        made.writer.send(b"entry")
        made.readers[0].done(1, DONE)
        with pytest.raises(RankLost, match="log entry 1 arrived, that of entry 0"):
            made.writer.outcomes(0)


def test_ring_stall_is_measured_from_the_oldest_entry_with_a_limit():
    with ring() as made:
        made.writer.send(b"step")
        made.now = 4.0
        made.writer.send(b"update", limited=False)
        assert made.writer.stalled_s() == 4.0
        made.readers[0].done(0, DONE)
        assert made.writer.stalled_s() == 0.0
        made.readers[0].done(1, DONE)
        made.writer.send(b"step")
        made.now = 5.0
        assert made.writer.stalled_s() == 1.0


@pytest.mark.parametrize("waits", ["outcomes", "send"])
def test_ring_outcome_that_a_watch_could_take_in_is_not_waited_for(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks after the check and before the wait: what it takes in then would never be readable again."""
    take = RingWriter._take

    def after_a_look(writer: RingWriter, timeout_ms: int | None) -> None:
        if timeout_ms is None:
            made.writer.stalled_s()
            assert made.writer._poll.poll(0), "nothing will ever arrive"
        take(writer, timeout_ms)

    monkeypatch.setattr(RingWriter, "_take", after_a_look)
    with ring(num_bytes=100) as made:
        made.writer.send(bytes(60))
        made.readers[0].done(0, DONE)
        if waits == "outcomes":
            assert made.writer.outcomes(0) == [DONE]
        else:
            made.writer.send(bytes(60))


def test_ring_reader_sees_the_end_of_rank_0():
    with ring() as made:
        os.close(made.writer._places[0])
        assert made.readers[0].read() is None
