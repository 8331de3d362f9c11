"""Stand-ins for the parts around the engine: a configuration, and the engine's end of a channel played by the test."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeVar

import msgspec

from forebay.config.engine_config import EngineConfig, EvictionPolicy, KernelBackend, Ledger, SchedulePolicy
from forebay.engine.channel import Channel, FrameEncoder
from forebay.engine.frames import Ready, State, ToEngine

F = TypeVar("F", bound=msgspec.Struct)

LIMIT_S = 10.0  # what never comes fails the test instead of hanging it

CONFIG = EngineConfig(
    model_path="none",
    served_model_name="fake",
    dtype="float32",
    device="cpu",
    num_threads=1,
    kernels=KernelBackend.TORCH,
    context_length=256,
    page_size=4,
    max_running_requests=8,
    max_total_tokens=1024,
    kv_cache_bytes=1 << 20,
    chunked_prefill_size=64,
    schedule_policy=SchedulePolicy.FCFS,
    schedule_conservativeness=1.0,
    radix_cache=True,
    radix_eviction_policy=EvictionPolicy.LRU,
    overlap_depth=0,
    max_queued_requests=32,
    max_queued_tokens=4096,
    queue_timeout_s=60.0,
    request_timeout_s=600.0,
    stall_timeout_s=60.0,
    ledger=Ledger.RAISE,
    log_level="warning",
)

READY = Ready(
    max_total_tokens=1024,
    max_running_requests=8,
    context_length=256,
    page_size=4,
    vocab_size=1000,
    eos_token_ids=[0],
    load_seconds=0.0,
    report=[],
    pid=1,
)


def state(**changes: Any) -> State:
    values: dict[str, Any] = {
        "step": 0,
        "num_running": 0,
        "num_waiting": 0,
        "num_waiting_tokens": 0,
        "pools": [],
        "last_step_age_s": 0.0,
        "oldest_wait_s": 0.0,
        "counters": {},
    }
    return State(**values | changes)


class ScriptedEngine:
    """The engine's end of a channel, and what `AsyncEngine` takes for its process."""

    def __init__(self, config: EngineConfig = CONFIG, exit_code: int = 0) -> None:
        self.sock, theirs = socket.socketpair()
        self.channel: Channel[ToEngine] = Channel(theirs, ToEngine)
        self.encoder = FrameEncoder()
        self.config = config
        self.pid = 1
        self.stopped = False
        self._exit_code = exit_code
        self._received: list[ToEngine] = []

    def stop(self, grace_s: float) -> int:
        self.sock.close()
        self.stopped = True
        return self._exit_code

    def say(self, frame: msgspec.Struct) -> None:
        self.channel.send(frame)

    def die(self) -> None:
        self.channel.close()

    async def heard(self, kind: type[F]) -> F:
        """The next frame, which has to be a `kind`."""
        async with asyncio.timeout(LIMIT_S):
            while not self._received:
                await asyncio.sleep(0)
                self._received = self.channel.receive(0)
        frame = self._received.pop(0)
        assert isinstance(frame, kind), frame
        return frame
