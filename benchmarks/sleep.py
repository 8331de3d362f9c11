"""What a sleep gives back and how long it takes, by tag, and how long an update of all weights holds requests up.

    python benchmarks/sleep.py [MODEL ...] [--repeats 5] [--streams 16]

Each model (the embedded one by default) behind a server of its own, over HTTP. Memory is what is resident of the server
and the engine together (`VmRSS`), after some requests and all captures.
"""

from __future__ import annotations

import argparse
import http.client
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

from forebay.formats.store import find_model

_LIMIT_S = 300.0
_SETTLED_S = 3.0
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

    def stream(self, max_tokens: int) -> Iterator[float]:
        """The times of a completion's events."""
        connection = http.client.HTTPConnection(self.url, timeout=_LIMIT_S)
        body = {"model": self.name, "prompt": _PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while line := response.readline():
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield time.perf_counter()

    def first_token_s(self) -> float:
        begin = time.perf_counter()
        return next(self.stream(1)) - begin

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
    command = [sys.executable, "-m", "forebay.cli.main", "serve", "--port", "0", "--log-level", "warning", *flags]
    command += ["--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("ready at ")), None)
            if line is None:
                raise SystemExit(f"the server of {model} ended with code {process.wait()} before it was ready")
            yield Server(line.split()[2], process.pid, model)
        finally:
            process.terminate()


def fastest_ms(seconds: list[float]) -> str:
    """What else a machine does only makes it slower."""
    return f"{min(seconds) * 1e3:.0f}"


def sleeps(server: Server, repeats: int, table: Table) -> None:
    for _ in range(3):
        list(server.stream(32))
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
    """How long nobody gets a token while all weights are read again, with so many requests under way."""

    def work() -> None:
        server.ask("POST", "/v1/completions", model=server.name, prompt=_PROMPT, max_tokens=48, ignore_eos=True)

    found = []
    for _ in range(repeats):
        threads = [threading.Thread(target=work) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        begin = time.perf_counter()
        server.ask("POST", "/update_weights_from_disk", model_path=path.name, mode="retract")
        found.append(time.perf_counter() - begin)
        for thread in threads:
            thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[""])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    words = parser.parse_args()
    columns = ("serving", "asleep", "awake again", "to sleep, ms", "to wake, ms", "to the first token, ms")
    table = Table("model", "released", *columns, title="MiB resident, and the fastest of the repeats")
    updates = Table(
        "model", "fastest, ms", "slowest, ms", title=f"update of all weights under {words.streams} requests"
    )
    for model in words.models:
        path = find_model(model or None).resolve()
        with serving(str(path), "--weights-root", str(path.parent)) as server:
            sleeps(server, words.repeats, table)
            seconds = update_s(server, path, words.streams, words.repeats)
            updates.add_row(server.name, fastest_ms(seconds), f"{max(seconds) * 1e3:.0f}")
    for found in (table, updates):
        Console(width=140).print(found)


if __name__ == "__main__":
    main()
