"""The load of `forebay bench serve`: arrivals, connections, and a clock on every chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.base.errors import ForebayError
from forebay.cli.bench_metrics import Sample
from forebay.cli.http_client import DONE, Connection, Origin, error_text

_USAGE = b'"usage":{'
_ERROR = b'{"error"'


@dataclass(frozen=True, slots=True)
class Target:
    origin: Origin
    model: str
    output_length: int
    ignore_eos: bool

    def payload(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.output_length,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


@dataclass(frozen=True, slots=True)
class Load:
    """`request_rate` is arrivals a second (Poisson), infinite for all at once; at most `concurrency` at a time."""

    prompts: list[list[int]]
    request_rate: float
    concurrency: int
    seed: int


async def run_load(target: Target, load: Load, advance: Callable[[], None]) -> tuple[list[Sample], float]:
    """Send everything; samples in the order of the prompts, and the seconds it took. A request that fails is a sample
    with an error. Raises Unavailable if the server cannot be reached at all."""
    free = [await Connection.connect(target.origin) for _ in range(min(load.concurrency, len(load.prompts)))]
    places = asyncio.Semaphore(load.concurrency)
    arrivals = _arrivals(load)
    started = time.perf_counter()

    async def one(prompt: list[int], at: float) -> Sample:
        delay = started + at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        async with places:
            connection = free.pop()
            if not connection.is_open:
                connection = await Connection.connect(target.origin)
            sample = await _measure(connection, target, prompt)
            free.append(connection)
            advance()
            return sample

    try:
        samples = await asyncio.gather(*map(one, load.prompts, arrivals))
        return list(samples), time.perf_counter() - started
    finally:
        for connection in free:
            connection.close()


def _arrivals(load: Load) -> list[float]:
    """Seconds after the start at which each request is sent."""
    if load.request_rate == float("inf"):
        return [0.0] * len(load.prompts)
    gaps = np.random.default_rng(load.seed).exponential(1 / load.request_rate, len(load.prompts))
    times: list[float] = np.cumsum(gaps).tolist()
    return times


async def _measure(connection: Connection, target: Target, prompt: list[int]) -> Sample:
    sample = Sample(time.perf_counter())
    usage = b""

    def on_event(data: bytes) -> None:
        # The common case costs a clock reading and two searches: parsing every chunk would slow the server next door.
        nonlocal usage
        if data.startswith(_ERROR):
            sample.error = data[:300].decode(errors="replace")
        elif data == DONE:
            pass
        elif b'"choices":[]' in data and _USAGE in data:
            usage = data
        else:
            sample.arrivals.append(time.perf_counter())

    try:
        body = await connection.request("POST", "/v1/completions", target.payload(prompt), on_event)
        if connection.status != 200:
            sample.error = error_text(connection.status, body)
    except ForebayError as error:
        sample.error = error.message
    sample.ended = time.perf_counter()
    if usage and not sample.error:
        counts = json.loads(usage)["usage"]
        sample.num_prompt_tokens = counts["prompt_tokens"]
        sample.num_output_tokens = counts["completion_tokens"]
    elif not sample.error:
        sample.error = "the stream ended without a usage chunk"
    return sample
