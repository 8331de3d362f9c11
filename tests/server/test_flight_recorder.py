"""The flight recorder of a server, on request: by an admin's route and by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.base.record_buffer import RecordBuffer, shared_memory
from forebay.base.signals import ENDING
from forebay.engine.client.recordings import Recordings
from forebay.engine.recorder.file import read
from forebay.engine.recorder.recorder import start as record
from forebay.http.listen import _signals
from forebay.scheduler.scheduler import Scheduler
from forebay.text.tokenizer import Tokenizer
from tests.deadlines import HANGS_S
from tests.server.conftest import start
from tests.server.fake_engine import FakeEngine
from tests.simulation.rig import config


def recorded_engine() -> FakeEngine:
    engine = FakeEngine()
    with shared_memory("test") as memory:
        buffer = RecordBuffer.of(memory.fileno(), 1 << 16)
    record(Scheduler(config()), buffer)
    engine.recordings = Recordings(buffer, lambda: {"model_type": "llama"}, has_tokens=False)
    return engine


def test_flight_recorder_route_writes_a_file_and_returns_its_path(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    server = start(tokenizer, recorded_engine)
    try:
        with server.client() as client:
            answer = client.post("/flight_recorder")
        assert answer.status_code == 200
        path = Path(answer.json()["path"])
        assert path.parent == tmp_path / "forebay" / "flights"
        assert read(path).header.model == {"model_type": "llama"}
    finally:
        server.close()


def test_flight_recorder_route_without_a_recorder_is_a_conflict(tokenizer: Tokenizer) -> None:
    server = start(tokenizer, FakeEngine)
    try:
        with server.client() as client:
            answer = client.post("/flight_recorder")
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "no_flight_recorder"
    finally:
        server.close()


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process as they were, the watchdog's among them: a loop leaves the system's."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_flight_recorder_signal_writes_a_file_and_stops_nothing() -> None:
    async def main() -> None:
        stop, written = asyncio.Event(), asyncio.Event()
        with _signals(stop, SimpleNamespace(force_exit=False), written.set):
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(written.wait(), HANGS_S)
            assert not stop.is_set()

    asyncio.run(main())
