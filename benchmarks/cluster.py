"""What a cluster with Ray costs, and how long its failures last.

    python -m benchmarks.cluster one        # this machine: start, memory of Ray, deaths of processes, an update
    python -m benchmarks.cluster two        # two network namespaces (root): a node that dies or is silent

Four clients ask a small model with random weights meanwhile, one request after another. Times end when the router
says so (`GET /members`): a server is announced when its actor runs again, and back when the router would send requests
to as many servers as before.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from forebay.base.proof import PROOF, Message, prove
from forebay.config.flag import Settled
from forebay.config.keys import cluster_key
from forebay.route.announcement import MEMBERS_PATH
from tests.cluster.load import PROMPTS, ask
from tests.cluster.machines import SMALL, Load, Machines, Pair, is_alive, local, of_home, processes, two_machines
from tests.cluster.test_with_ray import free_port, make_home
from tests.engine.conftest import make_chat_model

PORT: Final = 30000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("what", choices=("one", "two", "watch"))
    parser.add_argument("words", nargs="*", help="of `watch`, which the others start")
    what, words = vars(parser.parse_args()).values()
    if what == "watch":
        watch(*words)
        return
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
        load, watching = pair.load(url, 60), Watching(pair, url, server["instance"])
        began = time.monotonic()
        pair.kill(*pair.on("b", "raylet/raylet"))
        while is_alive(server["pid"]):
            time.sleep(0.05)
        tell("raylet killed: until the server is gone", began)
        pair.kill(*pair.on("b"))
        pair.start("b", 2)
        began = time.monotonic()
        watching.tell("raylet killed, from the return of its node", began, load)


def measured(
    machines: Machines, url: str, event: str, server: dict[str, Any], act: Callable[[], object], seconds: float = 30
) -> None:
    """Print how long a server is away after an event, and what became of requests meanwhile."""
    load, watching = machines.load(url, seconds), Watching(machines, url, server["instance"])
    time.sleep(1)
    began = time.monotonic()
    act()
    if event == "actor killed":
        while is_alive(server["pid"]):
            time.sleep(0.005)
        tell(f"{event}: until the server is gone", began)
    watching.tell(event, began, load)


class Watching:
    """A process on the router's machine that sees when there is another instance instead of one that is gone."""

    def __init__(self, machines: Machines, url: str, gone: str) -> None:
        key = machines.home / ".cache/forebay/cluster/cluster.key"
        path = machines.cluster_key_file if isinstance(machines, Pair) else key
        command = [*machines.before, sys.executable, "-m", "benchmarks.cluster", "watch", url, str(path), gone]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=machines.env)
        self._next()

    def _next(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, event: str, began: float, load: Load) -> None:
        while step := self._next():
            tell(f"{event}: until {step}", began)
        tell(f"{event}: all requests done", began, load)


def watch(url: str, key_file: str, gone: str) -> None:
    """Print a line when the members are known, when another instance is announced, and when it gets requests."""
    host, key = url.removeprefix("http://"), cluster_key_of(key_file)

    def members() -> list[dict[str, Any]]:
        connection = http.client.HTTPConnection(host)
        proof = prove(key, Message(method="GET", target=MEMBERS_PATH, host=host))
        connection.request("GET", MEMBERS_PATH, headers={"Host": host, PROOF: proof})
        found: list[dict[str, Any]] = json.loads(connection.getresponse().read())["members"]
        return found

    listed, before = ({member["instance"] for member in found} for found in (members(), able(members())))
    print("watching", flush=True)
    while not {member["instance"] for member in members()} - listed:
        time.sleep(0.02)
    print("it is announced", flush=True)
    while len(now := {member["instance"] for member in able(members())}) < len(before) or gone in now:
        time.sleep(0.02)
    print("it is back", flush=True)


def able(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those that get requests."""
    return [member for member in members if member["state"] == "ready" and not member["why"]]


def cluster_key_of(key_file: str) -> bytes:
    return cluster_key(Settled({"cluster_key_file": key_file}))


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
