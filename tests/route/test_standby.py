"""The prefix table at a standby router: what is sent, what is dropped, and when all of it is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from forebay.base.errors import Unavailable
from forebay.base.http_client import Origin
from forebay.route import standby
from forebay.route.prefixes import MOST_BLOCKS, Prefixes
from forebay.route.standby import MOST_PER_BATCH, Batch, Change, Received, Standby
from forebay.route.upstream import Head
from tests.simulation.virtual_time import VirtualLoop

A, B = "http://a:1", "http://b:1"


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Receiver:
    """A standby router in place of the connections to it."""

    def __init__(self) -> None:
        self.table, self.router, self.is_away, self.status = Prefixes(), "first", False, 200
        self.batches: list[Batch] = []
        self.origin = Origin("http://standby:1")

    async def ask(self, method: str, path: str, headers: object, body: bytes) -> tuple[Head, bytes]:
        await asyncio.sleep(0.01)
        if self.is_away:
            raise Unavailable("nobody listens")
        self.batches.append(batch := msgspec.json.decode(body, type=Batch))
        batch.apply(self.table)
        return Head(self.status, {}), msgspec.json.encode(Received(router=self.router))

    def restart(self) -> None:
        self.table, self.router = Prefixes(), "second"

    def close(self) -> None: ...


class Run:
    """An active router's table, its standby, and so many dropped changes, in virtual time."""

    def __init__(self) -> None:
        self.table, self.receiver, self.num_dropped = Prefixes(), Receiver(), 0

    def count_dropped(self, num: int) -> None:
        self.num_dropped += num

    @property
    def is_equal(self) -> bool:
        return [*self.table.entries()] == [*self.receiver.table.entries()]

    def play(self, script: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            sender = Standby(A, self.table, b"key", self, router_id="0" * 32)
            sender._pool = self.receiver  # type: ignore[assignment]
            sending = asyncio.create_task(sender.run())
            await script
            sending.cancel()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())


def test_standby_that_is_found_or_lost_is_one_log_line_with_its_entries(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.table.learn([block(1), block(2)], A)

    async def script() -> None:
        await asyncio.sleep(5.0)
        run.receiver.is_away = True
        run.table.learn([block(3)], A)
        await asyncio.sleep(20.0)
        run.receiver.is_away = False
        await asyncio.sleep(20.0)

    with caplog.at_level("INFO", "forebay"):
        run.play(script())
    found, lost, again = [record.getMessage() for record in caplog.records]
    assert found == "standby_found at=http://standby:1 entries=2"
    assert lost.startswith("standby_lost at=http://standby:1 why=")
    assert "nobody listens" in lost
    assert again == "standby_found at=http://standby:1 entries=3"


def test_standby_gets_all_changes_in_order_and_a_heartbeat() -> None:
    run = Run()

    async def script() -> None:
        await asyncio.sleep(1.0)
        run.table.learn([block(1), block(2)], A)
        run.table.learn([block(1), block(3)], B)
        await asyncio.sleep(1.0)
        assert run.is_equal
        assert len(run.table) == 4
        run.table.forget(B)
        await asyncio.sleep(1.0)
        assert [*run.receiver.table.entries()] == [(A, block(2), False), (A, block(1), True)]
        num = len(run.receiver.batches)
        await asyncio.sleep(10.0)
        assert num < len(run.receiver.batches) < num + 5
        assert run.num_dropped == 0

    run.play(script())


@pytest.mark.parametrize("how", ["away", "restarted", "refusing"])
def test_standby_that_was_away_gets_the_whole_table_in_its_order(how: str) -> None:
    run = Run()

    async def script() -> None:
        await asyncio.sleep(1.0)
        for i in range(300):
            run.table.learn([block(1000 * i + j) for j in range(3)], (A, B)[i % 2])
        run.table.learn([block(0), block(7)], A)  # another prompt goes on behind the first block
        run.table.learn([block(10**6 + i) for i in range(MOST_BLOCKS + 2)], A)
        await asyncio.sleep(5.0)
        assert run.is_equal
        if how == "restarted":
            run.receiver.restart()
        run.receiver.is_away, run.receiver.status = how == "away", 503 if how == "refusing" else 200
        await asyncio.sleep(5.0)
        run.table.learn([block(1), block(2)], B)
        run.table.learn([block(0)], A)
        await asyncio.sleep(5.0)
        run.receiver.is_away, run.receiver.status = False, 200
        await asyncio.sleep(5.0)
        assert run.is_equal
        assert run.num_dropped == (0 if how == "restarted" else 2)

    run.play(script())


def test_standby_that_is_too_slow_costs_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "MOST_WAITING", 10)
    run = Run()

    async def script() -> None:
        await asyncio.sleep(1.0)
        for i in range(25):
            run.table.learn([block(i)], A)
        assert run.num_dropped == 25
        await asyncio.sleep(5.0)
        assert run.is_equal

    run.play(script())


def test_standby_of_each_other_send_nothing_back() -> None:
    class Observer:
        def learned(self, *_: object) -> None:
            raise AssertionError

        forgot = learned

    table = Prefixes()
    table.observer = Observer()
    for changes in ([Change(url=A, blocks=[block(1).hex()])], [Change(url=A)]):
        Batch(begins_anew=True, changes=changes).apply(table)


@pytest.mark.parametrize(
    "changes",
    [
        [{"url": A}] * (MOST_PER_BATCH + 1),
        [{"url": A, "blocks": ["0" * 32] * (MOST_BLOCKS + 1)}],
        [{"url": A, "blocks": ["0" * 31]}],
        [{"url": "x" * 600}],
    ],
)
def test_c33_standby_batch_is_bounded(changes: list[dict[str, Any]]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"begins_anew": False, "changes": changes}, Batch)
