"""What the server needs to know about the engine and the model behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.config.engine_config import Setting
from forebay.engine.frames import Beat, Ready, State
from forebay.engine.stream import Receiver
from forebay.memory.radix_node import OPERATOR
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Failure


class TokenStream(Protocol):
    """One request's updates; the last has `finish`, whatever happens to the engine. See `engine.stream.Stream`."""

    request_id: int

    def deliver(self, receiver: Receiver) -> None: ...
    def abort(self) -> None: ...


class Engine(Protocol):
    """The part of `engine.async_engine.AsyncEngine` that the server uses. `submit` never waits; it raises Unavailable,
    Overloaded or PayloadTooLarge. `info` raises Unavailable while the model loads."""

    dead: Failure | None
    last_state: State | None
    last_beat: Beat | None

    @property
    def info(self) -> Ready: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def last_tick_age_s(self) -> float: ...
    def submit(
        self,
        *,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        namespace: str = "",
        author: str = OPERATOR,
        resume_points: Sequence[int] = (),
    ) -> TokenStream: ...
    async def died(self) -> Failure: ...
    async def state(self) -> State: ...
    async def flush_cache(self) -> State: ...
    async def close(self, drain_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """`created` is in seconds since 1970. `settings` are the effective configuration, for /server_info. The
    engine is given up when a step takes `stall_timeout_s`. With `uses_priority` it looks at the priorities of requests,
    to admit or to evict."""

    name: str
    path: str
    created: int
    settings: tuple[Setting, ...] = ()
    stall_timeout_s: float = 60.0
    uses_priority: bool = True
