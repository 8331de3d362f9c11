"""What prefill and decode on processes of their own cost and bring, on one machine: one process against `--pd local`.

    python -m benchmarks.disaggregation [--repeats 15] [--seconds 12] [--kill]

Both serve the default model on the same cores, at the same time and asked in turn. The first token of prompts of 128
and 2,000 tokens; the time between two tokens of 8 streams while a prompt of 2,000 tokens arrives every 4 s; and with
`--kill` how long after a kill of a server a request is answered again, and what is in quarantine in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.servers import served
from forebay.base.http_client import Origin, get_json
from forebay.bench.load import send

STREAMS, ARRIVALS_S = 8, 4.0
PATH = "/v1/completions"


def body(num_tokens: int, max_tokens: int) -> dict[str, Any]:
    ids = [random.randrange(1000, 40_000) for _ in range(num_tokens)]
    return {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}


async def stream(origin: Origin, num_tokens: int, max_tokens: int) -> list[float]:
    """When each of its tokens came, in seconds since the request."""
    answer = await send(origin, PATH, body(num_tokens, max_tokens))
    return [at - answer.sent for at in answer.arrivals]


async def first_tokens(servers: dict[str, Origin], num_tokens: int, repeats: int) -> dict[str, float]:
    """Medians, in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, origin in servers.items():
            found[name].append((await stream(origin, num_tokens, 1))[0])
    return {name: 1e3 * median(times) for name, times in found.items()}


async def between_tokens(origin: Origin, seconds: float, *, arrivals: bool) -> dict[str, float]:
    """Of 8 streams, in milliseconds; and how many tokens they had a second."""
    gaps: list[float] = []
    ending = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < ending:
            times = await stream(origin, 64, 64)
            gaps.extend(after - before for before, after in pairwise(times))

    async def prompts() -> None:
        asked = set()
        try:
            while True:
                asked.add(asyncio.create_task(stream(origin, 2000, 1)))
                await asyncio.sleep(ARRIVALS_S)
        finally:
            for task in asked:
                task.cancel()

    beside = asyncio.ensure_future(prompts() if arrivals else asyncio.sleep(0))
    await asyncio.gather(*(one() for _ in range(STREAMS)))
    beside.cancel()
    cuts = quantiles(gaps, n=100)
    return {"p50": 1e3 * median(gaps), "p99": 1e3 * cuts[98], "most": 1e3 * max(gaps), "tok/s": len(gaps) / seconds}


async def recovery(origin: Origin, pid: int, role: str) -> float:
    """Seconds from the kill of a server to the end of the first request that is answered."""
    lists = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    members = [int(child) for found in lists for child in found.read_text().split()]
    victim = next(m for m in members if f"mode={role}" in Path(f"/proc/{m}/cmdline").read_text())
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    while True:
        answer = await send(origin, PATH, {**body(16, 2), "stream": False})
        if answer.status == 200 and not answer.failure:
            return time.monotonic() - start
        await asyncio.sleep(0.1)


async def measure(servers: dict[str, Origin], pid: int, args: argparse.Namespace) -> None:
    for origin in servers.values():
        await stream(origin, 600, 8)  # warm
    for num_tokens in (128, 2000) if args.repeats else ():
        found = await first_tokens(servers, num_tokens, args.repeats)
        print(f"first token of {num_tokens}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items()))
    for arrivals in (False, True) if args.seconds else ():
        for name, origin in servers.items():
            found = await between_tokens(origin, args.seconds, arrivals=arrivals)
            load = "with prompts" if arrivals else "alone"
            print(
                f"between tokens of {STREAMS}, {load}, {name}: {json.dumps({k: round(v, 1) for k, v in found.items()})}"
            )
    if args.kill:
        for role in ("prefill", "decode"):
            print(f"after a kill of {role}: {await recovery(servers['pd'], pid, role):.1f} s")
    await asyncio.sleep(2.0)
    state = await get_json(servers["pd"], "/debug/state")
    print(f"in quarantine: {sum(pool['quarantined'] for pool in state['pools'])} of {len(state['pools'])} pools")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="of first tokens; 0: none")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load of streams; 0: none")
    parser.add_argument("--kill", action="store_true", help="measure recovery, too")
    args = parser.parse_args()
    with ExitStack() as stack:
        pid, pd = stack.enter_context(served("--pd=local", "--kv-cache-bytes=1GiB"))
        servers = {"one": stack.enter_context(served("--kv-cache-bytes=1GiB"))[1], "pd": pd}
        asyncio.run(measure(servers, pid, args))


if __name__ == "__main__":
    main()
