"""What a hundred grammars that were written to take all time or memory do to eight streams beside them.

    python -m benchmarks.bombs [--seconds 10]

Of a server with the default model. The time between two tokens of the streams without and with the bombs, four at a
time; what the answers were, and how long the slowest bomb waited for its own. Those that are answered with tokens are
harmless where each token costs little, however long the output: `a token` is the processor's time for its mask and for
reading it, in outputs of up to 64 tokens at random, and `broken` how many of these ended with `grammar_state`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median, quantiles
from typing import Any

import numpy as np
from llguidance import LLMatcher

from benchmarks.disaggregation import PATH, stream
from benchmarks.servers import served
from forebay.base.http_client import Connection, Origin
from forebay.config.resolve import resolve
from forebay.families.checkpoint import open_checkpoint
from forebay.grammar.compiler import compiled
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.text.tokenizer import Tokenizer
from tests.grammar.bombs import bombs

STREAMS, AT_A_TIME, NUM_TOKENS, OUTPUT = 8, 4, 32, 64
_FIELDS = {GrammarKind.JSON_SCHEMA: "guided_json", GrammarKind.REGEX: "guided_regex"}


async def gaps_until(origin: Origin, work: Awaitable[Any]) -> list[float]:
    """Between tokens of the streams while `work` goes on, and to the end of those that have begun."""
    ended, gaps = asyncio.ensure_future(work), list[float]()

    async def one() -> None:
        while not ended.done():
            times = await stream(origin, 64, 64)
            gaps.extend(after - before for before, after in pairwise(times))

    await asyncio.gather(*(one() for _ in range(STREAMS)))
    await ended
    return gaps


async def drop(origin: Origin, bomb: Grammar, few: asyncio.Semaphore) -> tuple[str, float]:
    """What came of it, and after how many seconds."""
    field = _FIELDS.get(bomb.kind, "guided_grammar")
    async with few:
        begin, connection = time.monotonic(), await Connection.connect(origin)
        try:
            await connection.request("POST", PATH, {"prompt": "go", "max_tokens": NUM_TOKENS, field: bomb.text})
        finally:
            connection.close()
        return str(connection.status), time.monotonic() - begin


def line(name: str, gaps: list[float]) -> float:
    p99 = quantiles(gaps, n=100)[98]
    print(f"{name:<16} p50 {1e3 * median(gaps):.1f} ms  p99 {1e3 * p99:.1f} ms  most {1e3 * max(gaps):.0f} ms")
    return p99


async def measure(origin: Origin, seconds: float) -> None:
    few, dropped = asyncio.Semaphore(AT_A_TIME), [bomb for bomb in bombs() if bomb.kind is not GrammarKind.CHOICE]
    await stream(origin, 64, 8)  # warm
    without = line("without", await gaps_until(origin, asyncio.sleep(seconds)))
    falling = asyncio.gather(*(drop(origin, bomb, few) for bomb in dropped))
    beside = line("beside bombs", await gaps_until(origin, falling))
    outcomes = await falling
    print(f"p99 {beside / without:.2f} times; {len(dropped)} bombs: {dict(Counter(told for told, _ in outcomes))}")
    print(f"the slowest was answered after {max(seconds for _, seconds in outcomes):.1f} s")
    harmless([bomb for bomb, (told, _) in zip(dropped, outcomes, strict=True) if told == "200"])


def harmless(answered: list[Grammar]) -> None:
    """Whether those are."""
    path = resolve({}).engine.model_path
    text, model = Tokenizer.from_path(path), open_checkpoint(path).config
    vocabulary = Vocabulary.of(text.table, model.eos_token_ids, model.vocab_size)
    tokenizer = vocabulary.tokenizer(partial(text.encode, add_special_tokens=False))
    times, broken = list[float](), 0
    for bomb in answered:
        matcher = compiled(bomb, tokenizer)
        times += costs(matcher, set(model.eos_token_ids))
        broken += matcher.is_error()
    p99 = quantiles(times, n=100)[98]
    print(f"{len(answered)} answered: a token p50 {1e3 * median(times):.2f} ms  p99 {1e3 * p99:.2f} ms", end="")
    print(f"  most {1e3 * max(times):.1f} ms  broken {broken}")


def costs(matcher: LLMatcher, ends: set[int]) -> Iterator[float]:
    """Seconds for each token of an output at random."""
    random, token = Random(1), -1
    for _ in range(OUTPUT):
        begin = time.thread_time()
        if token >= 0:
            matcher.consume_token(token)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        yield time.thread_time() - begin
        may = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) - ends
        if matcher.is_error() or not may:
            return
        token = random.choice(sorted(may))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    with served("--speculative-algorithm=off") as (_, origin):
        asyncio.run(measure(origin, asked.seconds))


if __name__ == "__main__":
    main()
