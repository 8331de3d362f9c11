"""What the self-checks of the prefix cache cost a server that is busy, one whose requests have pauses, and an idle one.

    python -m benchmarks.cache_checks                # the default model, 20 s for each load and rate: 4 minutes
    python -m benchmarks.cache_checks --seconds 5

Servers with 60 checks a minute and with none, one after the other; the default is one. A server first captures its
decode steps while it is idle, and checks nothing before that is done: the loads begin after the first check.

Busy: four clients send a prompt of 256 tokens as soon as their last answer of 32 tokens is there. With pauses: one
client waits half a second between two requests; its figure is the median time of a request for one token. Idle: nobody
sends anything. For each load the requests and tokens per second, the checks, their seconds by the server's own count,
and the processor time of its processes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import psutil

from benchmarks.servers import served

RATES: Final = (60, 0)  # checks a minute
MOST_SETTLING_S: Final = 120.0
CLIENTS: Final = 4
PROMPT: Final = 256  # tokens
PAUSE_S: Final = 0.5
REQUEST_LIMIT_S: Final = 300.0


class Counts(NamedTuple):
    """What a server has counted, and the CPU seconds of its processes."""

    checks: float
    check_s: float
    cpu_s: float


class Observed:
    """A server that runs, at `url`, with the process `pid`."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._process = url, psutil.Process(pid)

    def ask(self, draw: random.Random, max_tokens: int) -> tuple[float, int]:
        """Send a prompt of random tokens; return the seconds until its whole answer, and the tokens of both."""
        prompt = [draw.randrange(1000, 40_000) for _ in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        asked = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=REQUEST_LIMIT_S) as response:
            usage: dict[str, Any] = json.load(response)["usage"]
        return time.perf_counter() - begin, int(usage["total_tokens"])

    def counts(self) -> Counts:
        """Return what the server has counted so far."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=REQUEST_LIMIT_S) as response:
            text = response.read().decode()
        names = ("engine_cache_checks_total", "engine_check_seconds_total")
        found = [re.search(rf"^forebay:{name} (\S+)$", text, re.MULTILINE) for name in names]
        processes = [self._process, *self._process.children(recursive=True)]
        cpu_s = sum(sum(each.cpu_times()[:2]) for each in processes)
        checks, check_s = (float(each[1]) if each else 0.0 for each in found)
        return Counts(checks, check_s, float(cpu_s))


def busy(server: Observed, seconds: float) -> str:
    """Let several clients send without pauses."""
    end, counted = time.perf_counter() + seconds, list[int]()

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.perf_counter() < end:
            counted.append(server.ask(draw, 32)[1])

    begin = time.perf_counter()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{sum(counted) / (time.perf_counter() - begin):,.0f} tokens/s"


def with_pauses(server: Observed, seconds: float) -> str:
    """Send one request after the other, with a pause in front of each."""
    end, draw, times = time.perf_counter() + seconds, random.Random(0), list[float]()
    while not times or time.perf_counter() < end:
        time.sleep(PAUSE_S)
        times.append(server.ask(draw, 1)[0])
    return f"{statistics.median(times) * 1e3:.1f} ms a request, the slowest {max(times) * 1e3:.1f} ms"


def idle(server: Observed, seconds: float) -> str:
    """Send nothing."""
    time.sleep(seconds)
    return "no requests"


def settled_s(server: Observed) -> float:
    """Wait for the first check; return how long that took."""
    begin = time.perf_counter()
    while not server.counts().checks and time.perf_counter() - begin < MOST_SETTLING_S:
        time.sleep(0.5)
    return time.perf_counter() - begin


LOADS: Final[dict[str, Callable[[Observed, float], str]]] = {"busy": busy, "with pauses": with_pauses, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model without")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    args = parser.parse_args()
    words = [args.model] if args.model else []
    settling_s = 0.0
    for rate in RATES:
        with served(*words, f"--cache-check-rate={rate}", "--context-length=2048") as (pid, origin):
            server = Observed(str(origin), pid)
            server.ask(random.Random(1), 1)
            if settling_s:
                time.sleep(settling_s)
            else:
                settling_s = settled_s(server)
                print(f"the first check came after {settling_s:.0f} s", flush=True)
            for name, load in LOADS.items():
                before, begin = server.counts(), time.perf_counter()
                told = load(server, args.seconds)
                after, lasted = server.counts(), time.perf_counter() - begin
                checks, check_s, cpu_s = (b - a for a, b in zip(before, after, strict=True))
                print(
                    f"{rate} checks a minute, {name}: {told}; {checks:.0f} checks in {check_s:.2f} s "
                    f"({check_s / lasted:.2%} of the time), {cpu_s / lasted:.2f} s of CPU a second",
                    flush=True,
                )


if __name__ == "__main__":
    main()
