"""Refusals of clusters of several machines that are open to strangers, or whose nodes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.package import __version__
from forebay.cluster.messages import Facts, Listener
from forebay.cluster.placement import Node
from forebay.cluster.surroundings import AUTH_MODE

TOKEN: Final = "token"


def is_one_machine(nodes: Sequence[Node], here: str) -> bool:
    """Return whether all nodes are on this machine, whose address for Ray is `here`: servers then listen on
    loopback."""
    return all(node.address == here for node in nodes)


def refuse_open_cluster(nodes: Sequence[Node], facts: Mapping[str, Facts], key_file: str) -> None:
    """Raise ConfigError for a cluster of several machines in which a stranger could run code or announce servers."""
    open_nodes = [node.hostname for node in nodes if facts[node.id].auth_mode != TOKEN]
    missing = []
    if open_nodes:
        names = ", ".join(dict.fromkeys(open_nodes))
        missing.append(
            f"Ray runs without {AUTH_MODE}={TOKEN} on {names}, so everybody who reaches its ports runs code there: set "
            "it where Ray is started, with the same token on every node"
        )
    if not key_file:
        missing.append("servers and routers must prove who they are: give --cluster-key-file FILE, the same on all")
    if missing:
        raise ConfigError("the cluster has nodes on other machines: " + "; and ".join(missing))


def refuse_unlike_nodes(nodes: Sequence[Node], facts: Mapping[str, Facts], python: str) -> None:
    """Raise ConfigError, a line for each node on which a server cannot run as it would here."""
    digests = {facts[node.id].key_digest for node in nodes}
    problems = []
    for node in nodes:
        found = facts[node.id]
        name = f"{node.hostname} ({node.address})"
        if found.forebay != __version__:
            problems.append(f"{name} has forebay {found.forebay}, and this machine {__version__}")
        elif found.python != python:
            problems.append(f"{name} has Python {found.python}, and this machine {python}")
        elif found.problem:
            problems.append(f"{name}: {found.problem}")
    if not problems and len(digests) > 1:
        problems.append("the nodes have different keys at the path of --cluster-key-file: copy one file to all")
    if problems:
        raise ConfigError("\n".join(problems))


def ports_text(hostname: str, listeners: Sequence[Listener]) -> str:
    """Return a line with the ports of a node that are open to other machines, and the processes behind them."""
    by_process: dict[str, list[str]] = {}
    for listener in listeners:
        if not listener.address.startswith("127.") and listener.address != "::1":
            by_process.setdefault(listener.process or "unknown", []).append(str(listener.port))
    names = "; ".join(f"{name} {', '.join(dict.fromkeys(ports))}" for name, ports in sorted(by_process.items()))
    return f"open ports of {hostname}: {names or 'none'}"
