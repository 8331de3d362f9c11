"""Stand-ins for the parts around the engine: a configuration, and the engine's end of a channel played by the test."""

from __future__ import annotations

import asyncio
import socket
import time
import zlib
from dataclasses import asdict, fields, replace
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from forebay.config.engine_config import (
    CacheTypes,
    EngineConfig,
    KindOptions,
    Ledger,
    MemoryOptions,
    SchedulerConfig,
    SchedulingOptions,
)
from forebay.engine.channel import Channel, FrameEncoder
from forebay.engine.frames import Beat, Ready, State, ToEngine
from forebay.engine.loop.core import EngineCore
from forebay.formats.quantization import Quantization
from forebay.requests.step_plan import Launched, StepPlan, StepResult
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.scheduler import Scheduler
from tests.deadlines import HANGS_S

F = TypeVar("F", bound=msgspec.Struct)

CONFIG = EngineConfig(
    model_path="none",
    served_model_name="fake",
    quantization=Quantization.NONE,
    device="cpu",
    num_threads=1,
    activation_bits=16,
    kernels="torch",
    disable_cuda_graph=False,
    cuda_graph_max_bs=8,
    log_level="warning",
    types=CacheTypes(),
    memory=MemoryOptions(
        kv_cache_bytes=1 << 20, page_size=4, max_running_requests=8, context_length=256, max_total_tokens=1024
    ),
    scheduling=SchedulingOptions(
        chunked_prefill_size=64,
        mixed_chunk_size=64,
        max_queued_requests=32,
        max_queued_tokens=4096,
        ledger=Ledger.RAISE,
    ),
    kinds=KindOptions(track_interval=16, anchor_interval=64),
)


def changed(config: EngineConfig = CONFIG, **values: Any) -> EngineConfig:
    """With other values, each in the group that has it."""
    for name in ("memory", "scheduling", "kinds"):
        group = getattr(config, name)
        mine = {field.name: values.pop(field.name) for field in fields(group) if field.name in values}
        config = replace(config, **{name: replace(group, **mine)})
    return replace(config, **values)


READY = Ready(
    max_total_tokens=1024,
    max_running_requests=8,
    max_requests=CONFIG.memory.max_running_requests + CONFIG.scheduling.max_queued_requests,
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


def beat(**changes: float) -> Beat:
    return Beat(**{"turn_age_s": 0.0, "step_age_s": 0.0, "step_limit_s": 60.0} | changes)


class ScriptedEngine:
    """The engine's end of a channel, and what `AsyncEngine` takes for its process."""

    def __init__(self, config: EngineConfig = CONFIG, exit_code: int = 0) -> None:
        self.sock, theirs = socket.socketpair()
        self.channel: Channel[ToEngine] = Channel(theirs, ToEngine)
        self.encoder = FrameEncoder()
        self.config, self.records = config, None
        self.pid = 1
        self.stopped = False
        self.grace_s = -1.0  # of the last `stop`
        self._exit_code = exit_code
        self._received: list[ToEngine] = []

    def stop(self, grace_s: float) -> int:
        self.sock.close()
        self.stopped = True
        self.grace_s = grace_s
        return self._exit_code

    def say(self, frame: msgspec.Struct) -> None:
        self.channel.send(frame)

    def die(self) -> None:
        self.channel.close()

    async def heard(self, kind: type[F]) -> F:
        """The next frame, which has to be a `kind`."""
        async with asyncio.timeout(HANGS_S):
            while not self._received:
                await asyncio.sleep(0)
                self._received = self.channel.receive(0)
        frame = self._received.pop(0)
        assert isinstance(frame, kind), frame
        return frame


class PrefixRunner:
    """A runner whose next token is a hash of the tokens its KV holds, read through the page table: see `reference`."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, *, step_s: float = 0.0) -> None:
        self.plans: list[StepPlan] = []
        self._page_size = config.page_size
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._kv = np.zeros((config.num_pages + 1) * config.page_size, dtype=np.int64)
        pages_per_row = -(-config.context_length // config.page_size)
        self._table = np.zeros((config.max_running_requests + 1, pages_per_row), dtype=np.int64)
        self._last = np.zeros(config.max_running_requests + 1, dtype=np.int64)
        self._kv_lens = np.zeros(config.max_running_requests + 1, dtype=np.int64)

    def launch(self, plan: StepPlan) -> Launched:
        time.sleep(self._step_s)
        self.plans.append(plan)
        self._table[plan.writes.write_rows, plan.writes.write_columns] = plan.writes.write_pages
        self._kv_lens[plan.rows[: plan.num_extends]] = plan.starts
        known, drafts, sampled = iter(plan.input_ids.tolist()), iter(plan.drafts.tolist()), []
        for i, (row, q_len) in enumerate(zip(plan.rows.tolist(), plan.q_lens.tolist(), strict=True)):
            if i >= plan.num_extends:
                sampled.append(self._verify(row, [int(self._last[row]), *islice(drafts, q_len - 1)]))
                continue
            tokens = self._extend(row, list(islice(known, q_len)))
            sampled += [tokens] if plan.sample_mask[i] else []
        return Sampled(sampled)

    def _verify(self, row: int, tokens: list[int]) -> list[int]:
        """Compute tokens as long as each is what was sampled in front of it; what was sampled behind them."""
        sampled: list[int] = []
        for token in tokens:
            if sampled and token != sampled[-1]:
                break
            sampled += self._extend(row, [token])
        return sampled

    def _extend(self, row: int, tokens: list[int]) -> list[int]:
        """Compute the row's next tokens; what is sampled behind them."""
        start, position = self._kv_lens[row], np.arange(self._kv_lens[row] + len(tokens))
        at = self._table[row, position // self._page_size] * self._page_size + position % self._page_size
        self._kv[at[start:]] = tokens
        self._kv_lens[row] += len(tokens)
        self._last[row] = next_token(self._kv[at].tolist(), self._vocab_size)
        return [int(self._last[row])]


class Sampled:
    def __init__(self, token_ids: list[list[int]]) -> None:
        self._token_ids = token_ids

    def result(self) -> StepResult:
        return StepResult(token_ids=[*chain(*self._token_ids)], num_new=[len(tokens) for tokens in self._token_ids])


def next_token(tokens: list[int], vocab_size: int) -> int:
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes()) % vocab_size


def reference(prompt: list[int], num_tokens: int, vocab_size: int = READY.vocab_size) -> list[int]:
    """What `PrefixRunner` generates for a prompt, whatever ran beside it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


def scheduler_config(config: EngineConfig = CONFIG) -> SchedulerConfig:
    memory = config.memory
    return SchedulerConfig(
        **asdict(config.scheduling),
        page_size=memory.page_size,
        num_pages=(memory.max_total_tokens or 0) // memory.page_size,
        max_running_requests=memory.max_running_requests,
        context_length=memory.context_length,
    )


def fake_core(
    config: EngineConfig = CONFIG, *, step_s: float = 0.0, proposer: Proposer | None = None, **options: Any
) -> tuple[EngineCore, PrefixRunner]:
    """The real scheduler and core over a `PrefixRunner`."""
    limits = scheduler_config(config)
    runner = PrefixRunner(limits, READY.vocab_size, step_s=step_s)
    core = EngineCore(Scheduler(limits, proposer), runner, vocab_size=READY.vocab_size, **options)
    return core, runner
