"""How long a request of one API key waits for its first token beside 250 requests of another key.

    python -m benchmarks.tenants [--load words prompts choices images mixed] [--requests 250] [--probes 5]

Of a server with a model like SmolVLM-256M with random weights. The first key keeps the requests in flight: of 16 words
with answers of 256 tokens, of 1,500 tokens each, with `n` = 8, or each with an image of 16 million pixels. The second
key sends requests of 16 words and of an image of 32 x 32 pixels, one after the other; no image is sent twice. For each
load: the median and the longest time to the first token, and the processor time meanwhile, of the engine and of all the
server's processes; then the codes of the first key's answers.

The second key owns half of the engine, so a request gets what it needs in twice the processor time that it takes
alone. `beyond`: the engine's processor time until the first token less that, which is to be 2 s at most. Of the other
processes, those that decode images run beside the engine, on other cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import tempfile
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from PIL import Image

from benchmarks.servers import served
from forebay.base.errors import EngineError, ForebayError
from forebay.base.http_client import Origin
from forebay.bench.load import send as send_one
from forebay.cli.main import main as forebay

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIRST, SECOND = "key-of-the-first-tenant", "key-of-the-second-tenant"
EDGE = 4000  # pixels, of the first key's images
NUM_IMAGES = 16  # that differ


def words(num: int, max_tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    ids = [random.randrange(1000, 40_000) for _ in range(num)]
    return COMPLETIONS, {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}


@cache
def url_of(edge: int, number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (edge, edge), (number % 256, number // 256, 0)).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def image(edge: int, number: int) -> tuple[str, dict[str, Any]]:
    url = url_of(edge, number)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "stream": True}


Ask = Callable[[], tuple[str, dict[str, Any]]]
LOADS: dict[str, Ask] = {
    "words": lambda: words(16, 256),
    "prompts": lambda: words(1500, 256),
    "choices": lambda: words(1500, 256, n=8),
    "images": lambda: image(EDGE, random.randrange(NUM_IMAGES)),
    "mixed": lambda: random.choice([LOADS[name] for name in ("words", "prompts", "choices", "images")])(),
}
_NEW_IMAGES = count()
PROBES: dict[str, Ask] = {"words": lambda: words(16, 1), "an image": lambda: image(32, next(_NEW_IMAGES))}


async def send(origin: Origin, ask: Ask) -> tuple[str, float]:
    """Return the status, and the seconds to the first event of the answer."""
    answer = await send_one(origin, *ask())
    if answer.failure:
        raise EngineError(answer.failure, code="connection_lost")
    return str(answer.status), (answer.arrivals or [answer.ended])[0] - answer.sent


def cpu_s(pid: int) -> tuple[float, float]:
    """Return the processor time of the engine, and of all processes."""
    first = psutil.Process(pid)
    engine = total = 0.0
    for each in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds = sum(each.cpu_times()[:2])
            total += seconds
            engine += seconds if "forebay.engine.loop.process" in each.cmdline() else 0.0
    return engine, total


async def keep(origin: Origin, ask: Ask, codes: Counter[str]) -> None:
    while True:
        try:
            code, _ = await send(origin, ask)
        except (ForebayError, OSError) as error:
            code = type(error).__name__
        codes[code] += 1
        if code != "200":
            await asyncio.sleep(1)


async def probe(pid: int, origin: Origin, name: str, num: int, alone: Mapping[str, float]) -> dict[str, float]:
    """Send each kind of request `num` times, and print the figures. `alone` and the result: the engine's median
    processor time for each kind."""
    medians: dict[str, float] = {}
    for what, ask in PROBES.items():
        found = []
        for _ in range(num):
            before = cpu_s(pid)
            code, seconds = await send(origin, ask)
            engine, total = (after - then for after, then in zip(cpu_s(pid), before, strict=True))
            found.append((seconds, engine, total, code))
        waits, costs, totals, codes = zip(*found, strict=True)
        medians[what] = median(costs)
        share = 2 * alone.get(what, medians[what] / 2)
        print(
            f"{name:<10} {what:<9} first token p50 {median(waits):.2f} s  most {max(waits):.2f} s  "
            f"engine p50 {median(costs):.2f} s  most {max(costs):.2f} s  beyond {max(0.0, max(costs) - share):.2f} s  "
            f"all p50 {median(totals):.2f} s  most {max(totals):.2f} s  {dict(Counter(codes))}",
            flush=True,
        )
    return medians


async def measure(pid: int, url: str, args: argparse.Namespace) -> None:
    first, second = Origin(url, FIRST), Origin(url, SECOND)
    await probe(pid, second, "warm", 1, {})
    alone = await probe(pid, second, "alone", args.probes, {})
    for name in args.load:
        codes: Counter[str] = Counter()
        tasks = [asyncio.create_task(keep(first, LOADS[name], codes)) for _ in range(args.requests)]
        await asyncio.sleep(args.settle)
        await probe(pid, second, name, args.probes, alone)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(f"{name:<10} the first key's answers: {dict(codes)}", flush=True)
        await asyncio.sleep(args.settle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--requests", type=int, default=250, help="of the first key, in flight")
    parser.add_argument("--probes", type=int, default=5, help="of the second key, of each kind")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds after which a load has built up")
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--num-layers", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, keys = Path(folder) / "model", Path(folder) / "keys"
        shape = (f"--hidden-size={args.hidden_size}", f"--num-layers={args.num_layers}")
        assert forebay(["models", "make", "--like=smolvlm", f"--out={out}", *shape]) in (None, 0)
        keys.touch(mode=0o600)
        keys.write_text(f"{FIRST} name=first\n{SECOND} name=second\n")
        os.chmod(keys, 0o600)
        flags = ("--speculative-algorithm=off", "--context-length=8192")
        flags += (f"--max-running-requests={args.max_running_requests}",)
        flags += ("--max-queued-requests=4096", f"--max-queued-tokens={1 << 22}")  # so that all are in flight
        with served(str(out), *flags, f"--api-key-file={keys}") as (pid, origin):
            asyncio.run(measure(pid, str(origin), args))


if __name__ == "__main__":
    main()
