"""The gain of speculative decoding: a server with it beside one without, over HTTP, in pairs.

    python -m benchmarks.speculation [--serve --speculative-algorithm auto] [--repeats 5] [--streams 1 4 16 64]

Each prompt goes to one server after the other, which serve the same model; the answers must be equal. Some prompts ask
for what stands in them already (a text to quote, a file to edit), some for a chat, some are random tokens, of which
nothing can be guessed. A pair during which others computed is taken again. A ratio is the median of the pairs'.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks import kinds, machine
from benchmarks.report import NOISE, put_between_marks
from benchmarks.servers import OtherWork, Server, wait_until_quiet
from forebay.base.http_client import get_json, post_json
from forebay.bench.load import Load, Target, run_load

ROOT = Path(__file__).parent.parent
ATTEMPTS = 3
QUIET_LIMIT_S = 20.0
OUTPUT_LEN = 256


class Answer(NamedTuple):
    text: str
    tokens_per_s: float


def quoting(seed: int) -> str:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    text = "\n".join(lines[(start := 14 * seed % len(lines)) : start + 14])
    return f"Repeat the following text word for word, and nothing else:\n\n{text}"


def editing(seed: int) -> str:
    files = sorted((ROOT / "forebay" / "base").glob("*.py"))
    code = files[seed % len(files)].read_text()[:1400]
    return (
        f"Rename the first function in this file to `renamed` and print the whole file again:\n\n```python\n{code}\n```"
    )


def chatting(seed: int) -> str:
    topics = ("the sea", "bread", "a lighthouse", "winter", "prime numbers", "old maps", "bees", "trains")
    return f"Tell me what a curious ten-year-old should know about {topics[seed % len(topics)]}."


PROMPTS: dict[str, Callable[[int], str]] = {"quoting": quoting, "code editing": editing, "chat": chatting}


def chat(server: Server, prompt: str) -> Answer:
    """The answer to one prompt, greedy."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": OUTPUT_LEN,
        "temperature": 0.0,
    }
    started = time.perf_counter()
    answer = uvloop.run(post_json(server.origin, "/v1/chat/completions", body))
    seconds = time.perf_counter() - started
    tokens = answer["usage"]["completion_tokens"]
    return Answer(answer["choices"][0]["message"]["content"], tokens / seconds)


def streams(server: Server, count: int, seed: int) -> Answer:
    """`count` streams of random prompts at once."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(kinds.VOCAB_SIZE) for _ in range(128)] for _ in range(2 * count)]
    load = Load(prompts, float("inf"), count, seed=seed)
    run = uvloop.run(run_load(Target(server.origin, served_name(server), 128, True), load, lambda: None))
    if broken := [sample.error for sample in run.samples if sample.error]:
        raise SystemExit(f"{len(broken)} requests failed: {broken[0]}")
    return Answer("", sum(sample.num_output_tokens for sample in run.samples) / run.seconds)


def served_name(server: Server) -> str:
    name: str = uvloop.run(get_json(server.origin, "/v1/models"))["data"][0]["id"]
    return name


def pair(servers: Sequence[Server], ask: Callable[[Server], Answer], turn: int) -> list[float]:
    """Tokens per second of both, in the order of `servers`; asked one after the other, each first in every other turn.
    SystemExit where their answers differ."""
    rates, texts = [0.0] * len(servers), set()
    for _ in range(ATTEMPTS):
        wait_until_quiet(QUIET_LIMIT_S)
        noise = 0.0
        for i in range(len(servers)) if turn % 2 else reversed(range(len(servers))):
            other = OtherWork(servers[i])
            answer = ask(servers[i])
            noise = max(noise, other.share())
            rates[i] = answer.tokens_per_s
            texts.add(answer.text)
        if noise <= NOISE:
            break
    if len(texts) > 1:
        raise SystemExit(f"answers differ with guesses and without: {sorted(texts)}")
    return rates


def measure(
    servers: Sequence[Server], kinds_of_prompts: Sequence[str], numbers: Sequence[int], repeats: int
) -> list[tuple[str, list[list[float]]]]:
    rows: list[tuple[str, list[list[float]]]] = []
    for name in kinds_of_prompts:
        prompt = PROMPTS[name]
        for server in servers:
            chat(server, prompt(-1))  # what is done once
        pairs = [pair(servers, partial(chat, prompt=prompt(i)), i) for i in range(repeats)]
        rows.append((f"{name}, 1 stream", pairs))
        print(line(*rows[-1]), flush=True)
    for count in numbers:
        title = f"random prompts, {count} stream{'s' if count > 1 else ''}"
        for server in servers:
            streams(server, count, 1000 * count - 1)
        asks = [partial(streams, count=count, seed=1000 * count + i) for i in range(repeats)]
        rows.append((title, [pair(servers, ask, i) for i, ask in enumerate(asks)]))
        print(line(*rows[-1]), flush=True)
    return rows


def line(title: str, pairs: Sequence[Sequence[float]]) -> str:
    off, on = (median(rates) for rates in zip(*pairs, strict=True))
    ratio = median(b / a for a, b in pairs)
    return f"| {title} | {off:,.0f} | {on:,.0f} | {ratio:.2f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", nargs="*", default=[*PROMPTS], choices=[*PROMPTS], help="for one stream")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--model", help="as `forebay serve` takes it")
    parser.add_argument("--record", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=["--speculative-algorithm", "auto"])
    arguments = parser.parse_args()
    off, on = kinds.forebay(arguments.model, kinds.NO_GUESSES), kinds.forebay(arguments.model, arguments.serve)
    most = max(arguments.streams, default=1)
    with Server(off, streams=most) as plain, Server(on, streams=most) as guessing:
        rows = measure((plain, guessing), arguments.prompts, arguments.streams, arguments.repeats)
    table = "\n".join(
        [
            f"| tok/s | without | `{' '.join(arguments.serve)}` | ratio |",
            "|---|---|---|---|",
            *(line(*row) for row in rows),
        ]
    )
    text = f"{machine.caption(arguments.repeats, 'the default', quick=False)}\n\n{table}"
    print(f"\n{text}")
    if arguments.record:
        put_between_marks(ROOT / "docs" / "benchmarks.md", "speculation", text)


if __name__ == "__main__":
    main()
