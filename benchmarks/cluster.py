"""What a cluster with Ray costs, and how long its failures last.

    python -m benchmarks.cluster one        # this machine: start, memory of Ray, deaths of processes, an update
    python -m benchmarks.cluster two        # two network namespaces (root): a node that dies or is silent

Four clients ask a small model with random weights meanwhile, one request after another. On this machine `until back`
ends when the router would send requests to the server. On two machines it ends when `forebay cluster status`, which
takes seconds itself, shows the server as ready.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from forebay.route.announcement import MEMBERS_PATH
from forebay.server.http.security import PROOF, proof_of
from tests.cluster.load import PROMPTS, ask
from tests.cluster.machines import SMALL, Load, Machines, is_alive, local, of_home, processes, two_machines
from tests.cluster.test_with_ray import free_port, make_home
from tests.engine.conftest import make_chat_model

PORT: Final = 30000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("what", choices=("one", "two"))
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory(prefix="fb", dir="/tmp") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        model = make_chat_model(folder / "model", context_length=2048).path
        home = make_home(folder / "home")
        (one_machine if what == "one" else two_nodes)(home, folder, model)


def one_machine(home: Path, folder: Path, model: Path) -> None:
    with local(home) as machines:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        began = time.monotonic()
        machines.run("up", model, *SMALL, "--replicas=2", f"--port={port}")
        ask("127.0.0.1", port, "", PROMPTS[0], num_tokens=1)
        tell("from `cluster up` to the first token", began)
        ours = {*processes("forebay.cluster.member"), *processes("forebay.engine.loop.process")}
        tell_memory("Ray with its actors, of two servers and a router", sorted({*of_home(home)} - ours))
        server = servers(machines)[0]
        measured(machines, url, "server killed", server, lambda: os.kill(server["pid"], signal.SIGKILL))
        server = servers(machines)[0]
        measured(machines, url, "actor killed", server, lambda: os.kill(parent(server["pid"]), signal.SIGKILL))
        machines.run("scale", "1")
        load, began = machines.load(url, 30), time.monotonic()
        machines.run("update", model)
        tell("update of the model", began, load)
        machines.run("down")


def two_nodes(home: Path, folder: Path, model: Path) -> None:
    url = f"http://10.77.0.1:{PORT}"
    with two_machines(home, folder) as pair:
        pair.run("up", model, *SMALL, *pair.keys, "--replicas=2", f"--port={PORT}")

        def server_of_b() -> dict[str, Any]:
            return next(found for found in servers(pair) if found["node_address"] == "10.77.0.2")

        server = server_of_b()
        measured(pair, url, "node silent", server, lambda: pair.cut("b", "down"), seconds=60)
        pair.cut("b", "up")
        pair.kill(*pair.on("b"))
        pair.run("scale", "1")
        pair.start("b", 2)
        pair.run("scale", "3")
        server = server_of_b()
        load, began = pair.load(url, 60), time.monotonic()
        pair.kill(*pair.on("b", "raylet/raylet"))
        while is_alive(server["pid"]):
            time.sleep(0.05)
        tell("raylet killed: until the server is gone", began)
        pair.kill(*pair.on("b"))
        pair.start("b", 2)
        began = time.monotonic()
        pair.wait_ready(server["name"], after=server["pid"])
        tell("raylet killed: until the server is back, from the return of its node", began, load)


def measured(
    machines: Machines, url: str, event: str, server: dict[str, Any], act: Callable[[], object], seconds: float = 30
) -> None:
    """Print how long a server is away after an event, and what became of requests meanwhile."""
    load = machines.load(url, seconds)
    time.sleep(1)
    began = time.monotonic()
    act()
    if event == "actor killed":
        while is_alive(server["pid"]):
            time.sleep(0.005)
        tell(f"{event}: until the server is gone", began)
    if machines.key:
        machines.wait_ready(server["name"], after=server["pid"])
    else:
        wait_for_router(machines, url, server["instance"], 2)
    tell(f"{event}: until back", began, load)


def wait_for_router(machines: Machines, url: str, gone: str, count: int) -> None:
    """Wait until the router sends requests to `count` servers, none of them the instance that is gone."""
    key = (machines.home / ".cache/forebay/cluster/cluster.key").read_bytes()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    while True:
        connection.request("GET", MEMBERS_PATH, headers={PROOF: proof_of(key)})
        members = json.loads(connection.getresponse().read())["members"]
        able = [member for member in members if member["state"] == "ready" and not member["why"]]
        if len(able) == count and gone not in {member["instance"] for member in able}:
            return
        time.sleep(0.05)


def tell(what: str, began: float, load: Load | None = None) -> None:
    print(f"{what}: {time.monotonic() - began:.2f} s", flush=True)
    if load is not None:
        outcomes = load.outcomes()
        failed = [found for found in outcomes if found["status"] != 200]
        longest = max(found["ended"] - found["began"] for found in outcomes)
        retried = sum(found.get("route") == "retry" for found in outcomes)
        print(f"  {len(outcomes)} requests, {len(failed)} failed, {retried} retried, the longest took {longest:.1f} s")


def tell_memory(what: str, pids: list[int]) -> None:
    total = sum(pss_kib(pid) for pid in pids)
    print(f"memory of {what}: {total / 1024:.0f} MiB in {len(pids)} processes", flush=True)


def pss_kib(pid: int) -> int:
    """Return the memory of a process, with its share of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def servers(machines: Machines) -> list[dict[str, Any]]:
    return [found for found in machines.status().values() if found["role"] is not None]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


if __name__ == "__main__":
    main()
