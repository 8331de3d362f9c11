"""The load of `forebay bench serve`: arrivals, connections, and a clock on everything that is read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httptools
import numpy as np

from forebay.base.http_client import DONE, Origin, encode_request, error_text
from forebay.bench.connection import Answer, LoadConnection, read_answer
from forebay.bench.metrics import Sample
from forebay.bench.prompts import CHAT, COMPLETIONS, Prompt, Text


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured, and what each of its answers should be."""

    origin: Origin
    model: str
    output_length: int
    ignore_eos: bool
    route: str = COMPLETIONS

    def request(self, prompt: Prompt) -> bytes:
        """Return the bytes of the HTTP request for one prompt."""
        given, length = prompt if isinstance(prompt, Text) else (prompt, self.output_length)
        asked = {"messages": [{"role": "user", "content": given}]} if self.route == CHAT else {"prompt": given}
        payload: dict[str, Any] = {
            "model": self.model,
            **asked,
            "max_tokens": length,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }
        return encode_request(self.origin, "POST", self.route, payload)


@dataclass(frozen=True, slots=True)
class Load:
    """`request_rate` is arrivals a second, infinite for all at once; at most `concurrency` at a time. Gaps between them
    are of a gamma distribution with `burstiness` as its shape: 1 is Poisson."""

    prompts: Sequence[Prompt]
    request_rate: float
    concurrency: int
    seed: int
    burstiness: float = 1.0


class Timed(NamedTuple):
    """One answer; times in seconds of `time.perf_counter`. `arrivals` are those of the events of a stream but the last,
    which has no content. `failure` says why the answer is not whole, "" if it is."""

    status: int
    sent: float
    arrivals: list[float]
    ended: float
    failure: str


async def exchange(connection: LoadConnection, path: str, payload: dict[str, Any]) -> Timed:
    """Send one request and wait for the whole answer. Raises HttpParserError for an answer that is not HTTP."""
    answer = await connection.exchange(encode_request(connection.origin, "POST", path, payload))
    reading = read_answer(answer)
    arrivals = [at for at, event in reading.events if event != DONE]
    return Timed(reading.status, answer.sent, arrivals, answer.ended, answer.failure)


async def send(origin: Origin, path: str, payload: dict[str, Any]) -> Timed:
    """Send one request on a connection of its own, as `exchange` does. Raises Unavailable if no server listens."""
    connection = await LoadConnection.connect(origin)
    try:
        return await exchange(connection, path, payload)
    finally:
        connection.close()


class Run(NamedTuple):
    """The result of a load: samples in the order of the prompts, the seconds from the first request to the last
    answer's end, and the CPU seconds that this process spent in them."""

    samples: list[Sample]
    seconds: float
    cpu_seconds: float


async def run_load(target: Target, load: Load, advance: Callable[[], None]) -> Run:
    """Send everything. A request that fails is a sample with an error. Raises Unavailable if no server listens
    there."""
    free = [await LoadConnection.connect(target.origin) for _ in range(min(load.concurrency, len(load.prompts)))]
    places = asyncio.Semaphore(load.concurrency)
    requests = [target.request(prompt) for prompt in load.prompts]
    arrivals = _arrivals(load)
    started, cpu = time.perf_counter(), time.process_time()

    async def one(request: bytes, at: float) -> Answer:
        delay = started + at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        async with places:
            connection = free.pop()
            if not connection.is_open:
                connection = await LoadConnection.connect(target.origin)
            answer = await connection.exchange(request)
            if answer.failure and not answer.reads:
                # The server was closing the kept connection as the request went out (RFC 9112, section 9.3.1).
                connection = await LoadConnection.connect(target.origin)
                answer = await connection.exchange(request)
            free.append(connection)
            advance()
            return answer

    try:
        answers = await asyncio.gather(*map(one, requests, arrivals))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        for connection in free:
            connection.close()
    return Run(list(map(to_sample, answers)), seconds, cpu)


def _arrivals(load: Load) -> list[float]:
    """Seconds after the start at which each request is sent."""
    if load.request_rate == float("inf"):
        return [0.0] * len(load.prompts)
    shape = load.burstiness
    gaps = np.random.default_rng(load.seed).gamma(shape, 1 / (load.request_rate * shape), len(load.prompts))
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def to_sample(answer: Answer) -> Sample:
    """Make the sample of an answered request. Its tokens are counted by its usage or, where a server sends none, by its
    events: one each."""
    sample = Sample(answer.sent, ended=answer.ended, error=answer.failure)
    try:
        reading = read_answer(answer)
    except httptools.HttpParserError:
        return sample
    if not sample.error and reading.status != 200:
        sample.error = error_text(reading.status, bytes(reading.body))
    usage: dict[str, int] | None = None
    for at, data in reading.events:
        if data == DONE:
            continue
        event = _parsed(data)
        if "error" in event:
            sample.error = data[:300].decode(errors="replace")
        usage = event.get("usage") or usage
        if _has_token(event):
            sample.arrivals.append(at)
    if not sample.error:
        sample.num_prompt_tokens = usage["prompt_tokens"] if usage else 0
        sample.num_output_tokens = usage["completion_tokens"] if usage else len(sample.arrivals)
    return sample


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"error": "not a JSON object"}


def _has_token(event: dict[str, Any]) -> bool:
    """Return whether it brings one. Some servers end with an event that has only a reason, or only the usage; a token
    that is a part of a character has no text yet, and counts. A chat begins with whose turn it is."""
    choice = (event.get("choices") or [{"finish_reason": "none is here"}])[0]
    delta = choice.get("delta") or {}
    if choice.get("text") or any(value for name, value in delta.items() if name != "role"):
        return True
    return choice.get("finish_reason") is None and "role" not in delta
