"""A check of two engines: all columns, places of its own that come back, and what is wrong is said with both values."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from forebay.config.engine_config import DisaggregationMode, SchedulerConfig
from forebay.engine.frames import Checked, CheckTransfers
from forebay.engine.loop.checks import ROOM, Checks
from forebay.requests.transfers import CHECK, Offered, Ticket
from forebay.requests.updates import Failure
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.scheduler import Scheduler
from forebay.transfer.pattern import Pattern
from tests.deadlines import wait_until
from tests.kinds_of import kind_config
from tests.scheduler.rig import config
from tests.transfer.pair import EVERYTHING, NUM_SLOTS, OPTIONS, PLAIN, WINDOW, Half, half

KINDS = kind_config(num_slots=NUM_SLOTS["state"], num_window_pages=NUM_SLOTS["window"], window=WINDOW)


class Side:
    """A scheduler in a role, whose transfers are those of a half; nobody has asked it for anything."""

    def __init__(self, mode: DisaggregationMode, *, context_length: int = 64, **others: Any) -> None:
        self.half: Half = half(mode, **others)
        options = replace(OPTIONS, mode=mode)
        role = DecodeRole(options, self.half.transfers.instance) if options.is_decode else PrefillRole(options)
        limits: SchedulerConfig = config(
            page_size=self.half.cache.page_size,
            num_pages=NUM_SLOTS["kv"],
            max_running_requests=2,
            context_length=context_length,
            kinds=KINDS if others["specs"] is EVERYTHING else kind_config(),
            disaggregation=options,
        )
        self.scheduler = Scheduler(limits, None, role)
        self.checks = Checks(self.scheduler, self.half.transfers)

    def hear(self) -> None:
        select.select([self.half.transfers], [], [], 0.01)
        for event in self.half.transfers.poll():
            if not self.checks.take(event, 0.0):
                self.scheduler.handoff.take(event, 0.0)

    @property
    def at_rest(self) -> bool:
        self.scheduler.audit()
        return not self.scheduler.pools.deferred.entries and not self.scheduler.handoff.tickets.num_open


@contextmanager
def sides(**others: Any) -> Iterator[tuple[Side, Side]]:
    prefill = Side(DisaggregationMode.PREFILL, **{"specs": PLAIN, "page_size": 4, **others})
    try:
        decode = Side(DisaggregationMode.DECODE, **{"specs": PLAIN, "page_size": 16, **others})
        try:
            yield prefill, decode
        finally:
            decode.half.transfers.close()
    finally:
        prefill.half.transfers.close()


def check(prefill: Side, decode: Side) -> Checked | Failure:
    """What came of it; all places have come back."""
    port = prefill.half.transfers.port
    decode.checks.begin(CheckTransfers(serial=7, host="127.0.0.1", port=port), 0.0)
    found: list[tuple[int, Checked | Failure]] = []

    def ended() -> bool:
        prefill.hear()
        decode.hear()
        found.extend(decode.checks.take_answers())
        return bool(found) and prefill.at_rest and decode.at_rest

    wait_until(ended)
    [(serial, answer)] = found
    assert serial == 7
    return answer


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("specs", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_a_pattern_goes_through_every_column_and_its_places_come_back(backend: str, specs: Any) -> None:
    with sides(backend=backend, specs=specs) as (prefill, decode):
        for _ in range(2):
            answer = check(prefill, decode)
            assert isinstance(answer, Checked), answer
            assert (answer.transport, answer.wrong) == (backend, [])
            assert answer.num_bytes > 0
            assert answer.layout["columns"] == decode.half.transfers.layout.columns


def test_of_what_arrives_otherwise_both_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Pattern.write

    def write_wrong(self: Pattern) -> None:
        write(self)
        piece = [*self._pieces()][1]
        self._memory.scatter(piece, self._data(piece) ^ 0x0F)

    monkeypatch.setattr(Pattern, "write", write_wrong)
    with sides() as (prefill, decode):
        answer = check(prefill, decode)
        assert isinstance(answer, Checked), answer
        [line] = answer.wrong
        assert line.startswith("kv 0.v: 2 x 8 float32: at position 0 0x")
        sent, came = (int(word, 16) for word in line.split() if word.startswith("0x"))
        assert sent ^ came == 0x0F


def test_engines_that_do_not_fit_or_have_no_room_say_why() -> None:
    with sides(weights="ours") as (prefill, _):
        other = Side(DisaggregationMode.DECODE, specs=PLAIN, weights="theirs")
        refused = check(prefill, other)
        other.half.transfers.close()
        assert isinstance(refused, Failure)
        assert (refused.code, "'ours'" in refused.message, "'theirs'" in refused.message) == (
            "layout_mismatch", True, True,
        )  # fmt: skip
    with sides() as (prefill, decode):
        small = Side(DisaggregationMode.PREFILL, specs=PLAIN, context_length=8)
        full = check(small, decode)
        small.half.transfers.close()
        assert isinstance(full, Failure)
        assert (full.code, "16 tokens" in full.message, "at most 8" in full.message) == ("no_room", True, True)


def test_prefill_sets_nothing_aside_for_a_check_that_decode_has_refused_itself() -> None:
    with sides() as (prefill, decode):
        ticket = Ticket(decode.half.transfers.instance, ROOM, bytes(16))
        refused = Failure("Unavailable", "layout_mismatch", "prefill and decode do not fit together")
        assert prefill.checks.take(Offered(ticket, 16, CHECK, 0, declined=refused), 0.0)
        assert prefill.at_rest


def test_check_prefill_silent_ends_at_its_deadline_with_a_code_and_its_places_wait_for_the_peer() -> None:
    with sides() as (prefill, decode):
        decode.checks.begin(CheckTransfers(serial=7, host="127.0.0.1", port=prefill.half.transfers.port), 0.0)
        decode.checks.expire(OPTIONS.lease_s)
        assert decode.checks.take_answers() == []
        for _ in range(2):  # once only
            decode.checks.expire(OPTIONS.lease_s + 0.1)
        [(serial, failure)] = decode.checks.take_answers()
        assert serial == 7
        assert isinstance(failure, Failure)
        assert failure.code == "lease_timeout"
        assert f"{OPTIONS.lease_s:g} s" in failure.message

        def at_rest() -> bool:
            prefill.hear()
            decode.hear()
            return prefill.at_rest and decode.at_rest

        wait_until(at_rest)
        assert decode.checks.take_answers() == []
