"""What image files that are no images, or far too large ones, do to eight streams beside them.

    python -m benchmarks.image_bombs [--seconds 10]

Of a server with a model like SmolVLM-256M with random weights. The time between two tokens of the streams without and
with the files, four at a time; the codes of the answers; the server's memory before and after. Files with changed bytes
that can still be decoded are left out: they are images, and cost what images cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bombs import AT_A_TIME, gaps_until, line
from benchmarks.disaggregation import served, stream
from forebay.base.http_client import Connection, Origin
from forebay.cli.main import main as forebay
from forebay.server.images.decoding import ImageDecoder
from forebay.server.images.sources import Unreadable
from tests.server.images.smolvlm import TILING
from tests.server.images.test_hostile_images import FILES, MAX_BYTES, bombs, mutated, other_files

PATH = "/v1/chat/completions"
NUM_MUTATED = 100  # of each type
ELSEWHERE = ("http://127.0.0.1/a.png", "https://localhost/a.png", "file:///etc/passwd", "data:image/png,a", "a.png")


async def files() -> list[bytes]:
    """Return the contents that are refused."""
    found = [*bombs().values(), *other_files().values()]
    decoder = ImageDecoder(TILING, MAX_BYTES)
    try:
        for content in FILES.values():
            found += [content[:size] for size in (0, 1, 8, 20, len(content) // 2, len(content) - 40)]
            for changed in (mutated(content, seed) for seed in range(NUM_MUTATED)):
                try:
                    await decoder.decode(changed, splits=True)
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


async def measure(pid: int, origin: Origin, seconds: float) -> None:
    few, all_urls = asyncio.Semaphore(AT_A_TIME), requests(await files())
    await stream(origin, 64, 8)
    await send(origin, [f"data:;base64,{b64encode(FILES['png']).decode()}"], few)  # which starts the decoder's process
    without = line("without", await gaps_until(origin, asyncio.sleep(seconds)))
    before = memory_mb(pid)
    arriving = asyncio.gather(*(send(origin, urls, few) for urls in all_urls))
    beside = line("beside files", await gaps_until(origin, arriving))
    print(f"p99 {beside / without:.2f} times; {len(all_urls)} requests: {dict(Counter(await arriving))}")
    print(f"the server's memory: {before:.0f} MB before, {memory_mb(pid):.0f} MB after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        shape = ("--hidden-size=576", "--num-layers=30")
        assert forebay(["models", "make", "--like=smolvlm", f"--out={out}", *shape]) in (None, 0)
        with served(str(out), "--speculative-algorithm=off") as (pid, origin):
            asyncio.run(measure(pid, origin, asked.seconds))


if __name__ == "__main__":
    main()
