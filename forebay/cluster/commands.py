"""`forebay cluster up|status|scale|update|logs|down`: servers on a Ray cluster. Each command is a client of Ray and
ends; the servers stay."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parser, whole
from forebay.cluster.changes import scale, update
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, LogPart, LogRequest, Start, Status, Survey
from forebay.cluster.options import add_address
from forebay.cluster.placement import Node
from forebay.cluster.security import ports_text
from forebay.cluster.up import connected, down, unfinished_lines, up

FOLLOW_S: Final = 0.5
_BYTES_PER_LINE: Final = 200
_SHORT_GCS_TIMEOUT_S: Final = 300


def run(words: Sequence[str]) -> int:
    """Dispatch to the action named by the first word."""
    action = words[0] if words else ""
    if action in ("-h", "--help"):
        lines = [f"  {name:<8} {summary}" for name, (summary, _) in ACTIONS.items()]
        print("\n".join(["usage: forebay cluster ACTION [options]", "", *lines]))
        raise SystemExit(0)
    if action not in ACTIONS:
        raise ConfigError(f"there is no `forebay cluster {action}`: use {', '.join(ACTIONS)}")
    ACTIONS[action][1](words[1:])
    return 0


def status(words: Sequence[str]) -> None:
    """Print the state of servers, routers and nodes."""
    parser = Parser("cluster status", "Show servers, routers and nodes.", "[--json]")
    parser.option("--json", action="store_true", help="for programs")
    add_address(parser)
    own = parser.parse(words).own
    with connected(own.address) as group:
        statuses, nodes = group.statuses(), group.rays.nodes()
        facts = group.rays.survey(nodes, lambda node: Survey(words=(), share=0, num_cpus=0, memory_bytes=0))
        unfinished = group.rays.unfinished_start()
        if own.json:
            print(json.dumps(_as_dict(statuses, nodes, facts, unfinished), indent=2))
            return
        for line in _start_lines(statuses, unfinished):
            print(line)
        for name, found in statuses.items():
            for line in _status_lines(name, found):
                print(line)
        for node in nodes:
            for line in _node_lines(node, facts[node.id]):
                print(line)


def _start_lines(names: Iterable[str], unfinished: Start | None) -> list[str]:
    running = list(names)
    if unfinished is not None:
        return unfinished_lines(unfinished, running)
    if not running:
        return [
            "no servers run: start some with forebay cluster up, or end Forebay's own Ray with forebay cluster down"
        ]
    if not any(name.startswith("router-") for name in running):
        return ["no router runs: end the servers with forebay cluster down, then start again with forebay cluster up"]
    return []


def _status_lines(name: str, found: Status | str) -> list[str]:
    if isinstance(found, str):
        return [f"{name:<12} {'lost':<9} {found}"]
    cpus = f"cores {', '.join(map(str, found.cpus))}" if found.cpus else "all cores"
    starts = f"{found.num_starts} start{'s' * (found.num_starts != 1)}"
    version = f", weights {found.weight_version}" if found.weight_version else ""
    first = f"{name:<12} {found.phase:<9} {found.url}  {found.hostname}, pid {found.pid}, {cpus}, {starts}{version}"
    whys = [f"  {line}" for line in found.why.splitlines()]
    return [first, *whys, *(f"  {note}" for note in found.notes)]


def _node_lines(node: Node, facts: Facts) -> list[str]:
    free = f"{max(node.num_cpus, 0):g} of {node.total_cpus:g} CPU free"
    lines = [f"node {node.hostname} ({node.address}): {free}, without the GCS for at most {facts.gcs_timeout_s} s"]
    if facts.problem:
        lines.append(f"  {facts.problem}")
    elif facts.gcs_timeout_s < _SHORT_GCS_TIMEOUT_S:
        lines.append("  then all servers end, mid-stream: set RAY_gcs_rpc_server_reconnect_timeout_s=600 for Ray")
    if facts.niceness:
        lines.append(f"  Ray gives its workers niceness {facts.niceness}: start it with RAY_worker_niceness=0")
    return [*lines, f"  {ports_text(node.hostname, facts.listeners)}"]


def _as_dict(
    statuses: dict[str, Status | str], nodes: Sequence[Node], facts: dict[str, Facts], unfinished: Start | None
) -> dict[str, Any]:
    actors = [
        {"name": name, "phase": "lost", "why": found} if isinstance(found, str) else msgspec.to_builtins(found)
        for name, found in statuses.items()
    ]
    places = [{"address": node.address, **msgspec.to_builtins(facts[node.id])} for node in nodes]
    return {"actors": actors, "nodes": places, "unfinished_up": msgspec.to_builtins(unfinished)}


def logs(words: Sequence[str]) -> None:
    """Print the last lines of servers' logs, and with --follow the lines added later."""
    parser = Parser("cluster logs", "Show the log of a server, or of all.", "[NAME] [options]")
    parser.option("name", nargs="?", default="", help="such as server-1; all without")
    parser.option("--lines", type=whole(1, 100_000), default=20, metavar="N", help="lines of each")
    parser.option("--follow", action="store_true", help="go on until Ctrl-C")
    add_address(parser)
    own = parser.parse(words).own
    with connected(own.address) as group:
        names = group.rays.actors()
        if own.name and own.name not in names:
            raise ConfigError(f"there is no server {own.name!r}: there are {', '.join(names) or 'none'}")
        names = [own.name] if own.name else names
        offsets = {}
        for name in names:
            part = _part(group, name, -own.lines * _BYTES_PER_LINE)
            _print_log(name, part.text.splitlines()[-own.lines :], several=len(names) > 1)
            offsets[name] = part.next_offset
        while own.follow:
            time.sleep(FOLLOW_S)
            for name in names:
                part = _part(group, name, offsets[name])
                end = part.text.rfind(b"\n") + 1
                _print_log(name, part.text[:end].splitlines(), several=len(names) > 1)
                offsets[name] = part.next_offset - (len(part.text) - end)


def _part(group: Group, name: str, offset: int) -> LogPart:
    found = group.rays.call(name, "log", LogRequest(offset=offset).encode())
    return msgspec.msgpack.decode(found, type=LogPart)


def _print_log(name: str, lines: Sequence[bytes], *, several: bool) -> None:
    for line in lines:
        print(f"{f'{name}: ' if several else ''}{line.decode(errors='replace')}")
    sys.stdout.flush()


ACTIONS: Final = {
    "up": ("start servers and their router", up),
    "status": ("show servers, routers and nodes", status),
    "scale": ("start or drain servers", scale),
    "update": ("change the model or the weights, without a pause", update),
    "logs": ("show what servers log", logs),
    "down": ("drain and end all", down),
}
