"""What image files that are no images, or far too large ones, do to eight streams beside them.

    python -m benchmarks.image_bombs [--seconds 20] [--rate 20]

Of a server with a model like SmolVLM-256M with random weights. The time between two tokens of the same streams before,
beside and after requests with files, so many a second, four at most at a time; the codes of the answers; the server's
memory before and after. Files with changed bytes that can still be decoded are left out: they cost what images cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from base64 import b64encode
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.bombs import AT_A_TIME, STREAMS, line
from benchmarks.disaggregation import PATH as COMPLETIONS
from benchmarks.disaggregation import body
from benchmarks.servers import served
from forebay.base.http_client import Connection, Origin
from forebay.cli.main import main as forebay
from forebay.http.preparation import Preparation, staying_client
from forebay.server.images.decoding import ImageDecoder
from forebay.server.images.sources import Unreadable
from tests.server.images.smolvlm import TILING
from tests.server.images.test_hostile_images import FILES, MAX_BYTES, bombs, mutated, other_files

PATH = "/v1/chat/completions"
NUM_MUTATED = 100  # of each type
WORDS, OUTPUT = 32, 4000  # tokens of a stream
ELSEWHERE = ("http://127.0.0.1/a.png", "https://localhost/a.png", "file:///etc/passwd", "data:image/png,a", "a.png")


async def files() -> list[bytes]:
    """Return the contents that are refused."""
    found = [*bombs().values(), *other_files().values()]
    decoder, client = ImageDecoder(Preparation({}), TILING, MAX_BYTES), staying_client()
    try:
        for content in FILES.values():
            found += [content[:size] for size in (0, 1, 8, 20, len(content) // 2, len(content) - 40)]
            for changed in (mutated(content, seed) for seed in range(NUM_MUTATED)):
                try:
                    await decoder.decode(client, changed, splits=True)
                except Unreadable:
                    found.append(changed)
    finally:
        decoder.close()
    return found


def requests(contents: list[bytes]) -> list[list[str]]:
    """Return the URLs of each request's images."""
    urls = [f"data:image/png;base64,{b64encode(content).decode()}" for content in contents]
    return [*([url] for url in urls), *([url] for url in ELSEWHERE), [urls[0]] * 300]


async def send(origin: Origin, urls: list[str], few: asyncio.Semaphore) -> str:
    """Return the code of the answer."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    async with few:
        connection = await Connection.connect(origin)
        try:
            answer = json.loads(await connection.request("POST", PATH, body))
        finally:
            connection.close()
    return f"{connection.status} {answer.get('error', {}).get('code')}"


def memory_mb(pid: int) -> float:
    """Return the memory of a server's processes; pages that several share are divided among them."""
    first = psutil.Process(pid)
    return float(sum(each.memory_full_info().pss for each in (first, *first.children(recursive=True))) / 1e6)


class Stream:
    """A long answer, with the times at which its tokens came."""

    def __init__(self, origin: Origin) -> None:
        self._times: list[float] = []
        self._task = asyncio.create_task(self._run(origin))

    async def _run(self, origin: Origin) -> None:
        connection = await Connection.connect(origin)
        try:
            asked = body(WORDS, OUTPUT)
            await connection.request("POST", COMPLETIONS, asked, lambda _: self._times.append(time.monotonic()))
        finally:
            connection.close()

    async def begun(self) -> None:
        while not self._times:
            await asyncio.sleep(0.01)

    def gaps(self, since: float) -> list[float]:
        """Return the times between tokens that came since then."""
        assert not self._task.done(), "an answer has ended: give fewer --seconds"
        return [after - before for before, after in pairwise(self._times) if before >= since]

    def end(self) -> None:
        self._task.cancel()


async def hostile(origin: Origin, all_urls: list[list[str]], seconds: float, rate: float) -> Counter[str]:
    """Send `rate` of the requests a second, in an order by chance, and count the codes of the answers."""
    few, chosen = asyncio.Semaphore(AT_A_TIME), Random(0).choices(all_urls, k=int(seconds * rate))
    sent = []
    for urls in chosen:
        sent.append(asyncio.create_task(send(origin, urls, few)))
        await asyncio.sleep(1 / rate)
    return Counter(await asyncio.gather(*sent))


async def measure(pid: int, origin: Origin, seconds: float, rate: float) -> None:
    all_urls = requests(await files())
    await send(origin, [f"data:;base64,{b64encode(FILES['png']).decode()}"], asyncio.Semaphore())
    streams = [Stream(origin) for _ in range(STREAMS)]
    for each in streams:
        await each.begun()
    p99: list[float] = []
    for phase in ("before", "beside files", "after"):
        since, memory = time.monotonic(), memory_mb(pid)
        if phase == "beside files":
            codes = await hostile(origin, all_urls, seconds, rate)
            told = f"the server's memory: {memory:.0f} MB before, {memory_mb(pid):.0f} MB after"
        else:
            await asyncio.sleep(seconds)
        p99.append(line(phase, [gap for each in streams for gap in each.gaps(since)]))
    for each in streams:
        each.end()
    print(f"p99 {2 * p99[1] / (p99[0] + p99[2]):.2f} times; {dict(codes)}; {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        shape = ("--hidden-size=576", "--num-layers=30")
        assert forebay(["models", "make", "--like=smolvlm", f"--out={out}", *shape]) in (None, 0)
        with served(str(out), "--speculative-algorithm=off", "--context-length=8192") as (pid, origin):
            asyncio.run(measure(pid, origin, asked.seconds, asked.rate))


if __name__ == "__main__":
    main()
