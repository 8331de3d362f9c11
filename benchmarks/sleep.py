"""What a sleep gives back and how long it takes, by tag, and how long an update of all weights holds requests up.

    python benchmarks/sleep.py [MODEL ...] [--repeats 5] [--streams 16] [--only bare,sleeps,update,idle]

Each model (the embedded one by default) behind a server of its own, over HTTP. Memory is what is resident of the server
and the engine together (`VmRSS`), after some requests and all captures. `bare` is the same of two processes that have
imported what these have, and no model. `idle` is a minute's shape in a fifth of the time: with --sleep-idle-seconds 1 a
request every 12 s, for 5 s and every 60 s.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.servers import started
from forebay.base.http_client import Origin
from forebay.bench.load import send
from forebay.engine.lifecycle.spawn import spawn
from forebay.formats.store import find_model

_LIMIT_S = 300.0
_SETTLED_S = 3.0
_ROUND_S = 12.0
_WHO = ("server", "engine")
_MIB = 1 << 20
_PROMPT = "The capital of France is"
TAGS = (["kv_cache"], ["weights"], ["cuda_graph"], ["kv_cache", "weights", "cuda_graph"])


class Server:
    def __init__(self, url: str, pid: int, model: str) -> None:
        self.url, self.pid, self.model = url.removeprefix("http://"), pid, model
        self.name: str = self.ask("GET", "/v1/models")["data"][0]["id"]

    def ask(self, method: str, path: str, **body: Any) -> Any:
        connection = http.client.HTTPConnection(self.url, timeout=_LIMIT_S)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {answer}")
        return answer

    def stream(self, max_tokens: int) -> list[float]:
        """The times of a completion's events."""
        body = {"model": self.name, "prompt": _PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        sending = send(Origin(self.url), "/v1/completions", body)
        return asyncio.run(asyncio.wait_for(sending, _LIMIT_S)).arrivals

    def first_token_s(self) -> float:
        begin = time.perf_counter()
        return self.stream(1)[0] - begin

    def resident(self) -> int:
        """Bytes of the server and its engine; the chat templates' process is as it was."""
        return sum(_resident(pid) for pid in (self.pid, *_children(self.pid)) if not _is_template(pid))


def _children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def _is_template(pid: int) -> bool:
    return b"template_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    words = ("serve", "--port=0", "--log-level=warning", *flags, "--model", model)
    with started("forebay", *words) as (pid, url):
        yield Server(url, pid, model)


def fastest_ms(seconds: list[float]) -> str:
    """What else a machine does only makes it slower."""
    return f"{min(seconds) * 1e3:.0f}"


def sleeps(server: Server, repeats: int, table: Table) -> None:
    for _ in range(3):
        server.stream(32)
    time.sleep(_SETTLED_S)  # graphs are captured
    serving_bytes = server.resident()
    for tags in TAGS:
        slept, woken, first, asleep = [], [], [], 0
        for _ in range(repeats):
            slept.append(server.ask("POST", "/release_memory_occupation", tags=tags)["last_sleep_s"])
            asleep = server.resident()
            begin = time.perf_counter()
            woken.append(server.ask("POST", "/resume_memory_occupation", tags=tags)["last_wake_s"])
            server.first_token_s()
            first.append(time.perf_counter() - begin)
        sizes = (f"{size / _MIB:.0f}" for size in (serving_bytes, asleep, server.resident()))
        table.add_row(server.name, ", ".join(tags), *sizes, *map(fastest_ms, (slept, woken, first)))


def update_s(server: Server, path: Path, num_streams: int, repeats: int) -> list[float]:
    """The longest time in which none of so many streams gets a token while all weights are read again: each that ends,
    as those do that an update interrupts, is followed by another."""
    found = []
    for _ in range(repeats):
        times: list[float] = []
        done = threading.Event()

        def work(times: list[float], done: threading.Event) -> None:
            while not done.is_set():
                times.extend(server.stream(48))

        threads = [threading.Thread(target=work, args=(times, done)) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        server.ask("POST", "/update_weights_from_disk", model_path=path.name, mode="retract")
        time.sleep(0.5)
        done.set()
        for thread in threads:
            thread.join()
        times.sort()
        found.append(max(after - before for before, after in itertools.pairwise(times)))
    return found


def bare_bytes() -> tuple[int, int]:
    """Resident of a server and of an engine that have imported all and have no model."""
    modules = "forebay.cli.serving, forebay.server.serve, forebay.http.listen, forebay.text.tokenizer, uvloop"
    command = [sys.executable, "-c", f"import gc; gc.disable(); import {modules}; print(); input()"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    engine = spawn()
    try:
        assert server.stdout is not None
        server.stdout.readline()
        before = -1
        while (after := _resident(engine.child.pid)) != before:
            before = after
            time.sleep(_SETTLED_S)
        return _resident(server.pid), after
    finally:
        engine.discard()
        server.kill()
        server.wait()


def idle_bytes(server: Server, num_rounds: int = 2) -> tuple[int, int]:
    """Resident just behind a request, and on average over rounds of a request and silence."""
    serving, found = 0, []
    for _ in range(num_rounds):
        server.stream(32)
        serving, until = server.resident(), time.monotonic() + _ROUND_S
        while time.monotonic() < until:
            found.append(server.resident())
            time.sleep(0.1)
    return serving, sum(found) // len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[""])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--only", default="bare,sleeps,update,idle")
    words = parser.parse_args()
    columns = ("serving", "asleep", "awake again", "to sleep, ms", "to wake, ms", "to the first token, ms")
    table = Table("model", "released", *columns, title="MiB resident, and the fastest of the repeats")
    updates = Table(
        "model", "fastest, ms", "slowest, ms", title=f"nobody gets a token: new weights under {words.streams} streams"
    )
    idle = Table("model", "serving", "on average", title="MiB resident with a request now and then")
    if "bare" in words.only:
        print(*(f"{who}, no model: {size / _MIB:.0f} MiB" for who, size in zip(_WHO, bare_bytes(), strict=True)))
    for model in words.models:
        path = find_model(model or None).resolve()
        with serving(str(path), "--weights-root", str(path.parent)) as server:
            if "sleeps" in words.only:
                sleeps(server, words.repeats, table)
            if "update" in words.only:
                seconds = update_s(server, path, words.streams, words.repeats)
                updates.add_row(server.name, fastest_ms(seconds), f"{max(seconds) * 1e3:.0f}")
        if "idle" in words.only:
            with serving(str(path), "--sleep-idle-seconds=1") as server:
                server.stream(32)
                idle.add_row(server.name, *(f"{size / _MIB:.0f}" for size in idle_bytes(server)))
    for found in (table, updates, idle):
        if found.row_count:
            Console(width=140).print(found)


if __name__ == "__main__":
    main()
