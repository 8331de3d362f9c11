"""`forebay cluster scale` and `update`: servers are started before others are drained."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

import msgspec

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parser, number
from forebay.cluster.group import Group
from forebay.cluster.messages import Needs, Spec, Status, Survey
from forebay.cluster.options import READY_TIMEOUT_S, absolute, add_address, counts_of, next_name, with_model
from forebay.cluster.placement import Node
from forebay.cluster.rays import recall_update, remember_update
from forebay.cluster.security import refuse_unlike_nodes
from forebay.cluster.up import connected, report
from forebay.route.announcement import Role


def scale(words: Sequence[str]) -> None:
    """Start or drain servers until there are as many as wanted."""
    summary = "Start or drain servers until there are N, or of prefill and decode as many as 2p2d says."
    parser = Parser("cluster scale", summary, "N|NpMd [options]")
    parser.option("count", nargs="?", default="", help="servers that there are to be")
    _add_timeout(parser)
    own = parser.parse(words).own
    with connected(own.address) as group:
        servers = servers_of(group.specs())
        wanted = wanted_counts(own.count, servers)
        more, fewer = difference(servers, wanted)
        if more:
            _start(group, more, servers, own.ready_timeout)
        group.drain(fewer)
        kinds = (f"{count} {'server' if role is Role.BOTH else role}" for role, count in wanted.items())
        report(f"there are as many as wanted: {', '.join(kinds)}")


def servers_of(specs: Sequence[Spec]) -> list[Spec]:
    """Return the specs of servers, without routers. Raises ConfigError if there is none."""
    servers = [spec for spec in specs if spec.role is not None]
    if not servers:
        raise ConfigError("no server is left that another could be like: forebay cluster down, then up")
    return servers


def wanted_counts(text: str, servers: Sequence[Spec]) -> dict[Role, int]:
    """Read the argument of `scale`. Raises ConfigError if it does not fit the servers that run."""
    whole = any(spec.role is Role.BOTH for spec in servers)
    if not whole:
        return counts_of(text)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"forebay cluster scale {text or 'N'}: write how many servers there are to be, at least 1")
    return {Role.BOTH: int(text)}


def difference(servers: Sequence[Spec], wanted: Mapping[Role, int]) -> tuple[list[Spec], list[Spec]]:
    """Return the servers to start, each like another of its role, and those to drain: the ones started last."""
    more: list[Spec] = []
    fewer: list[Spec] = []
    for role, count in wanted.items():
        there = [spec for spec in servers if spec.role is role]
        fewer += there[count:]
        names = [spec.name for spec in there]
        for _ in range(count - len(there)):
            names.append(next_name(role, names))
            more.append(msgspec.structs.replace(there[0], name=names[-1], group=""))
    return more, fewer


def update(words: Sequence[str]) -> None:
    """Replace the servers by others with another model, or their weights."""
    summary = (
        "Replace all servers, one or one pair after another, by servers of MODEL: each is ready before an old one is\n"
        "drained. With --weights the servers stay, and load other weights of the same model."
    )
    parser = Parser("cluster update", summary, "MODEL | --weights PATH [options]")
    parser.option("model", nargs="?", default="", help="as for forebay serve")
    parser.option("--weights", default="", metavar="PATH", help="a checkpoint of the same model, below --weights-root")
    _add_timeout(parser)
    own = parser.parse(words).own
    if bool(own.model) == bool(own.weights):
        raise ConfigError("forebay cluster update: give either MODEL or --weights PATH")
    with connected(own.address) as group:
        servers = servers_of(group.specs())
        if own.weights:
            path = str(absolute("model_path", own.weights))
            for unit in together(servers):
                for spec in unit:
                    group.update_weights(spec, path, recall_update(spec.name))
            return
        needs = _needs_of(group, [with_model(spec, own.model) for spec in servers])
        for unit in together(servers):
            names = [spec.name for spec in servers_of(group.specs())]
            renewed = [_renewed(spec, own.model, names, needs) for spec in unit]
            _start(group, renewed, (), own.ready_timeout)
            group.drain(unit)


def together(servers: Sequence[Spec]) -> list[list[Spec]]:
    """Return the servers that are replaced at once: a prefill server with a decode server, so that there is always a
    pair with the same weights."""
    prefill = [spec for spec in servers if spec.role is Role.PREFILL]
    decode = [spec for spec in servers if spec.role is Role.DECODE]
    units = [[spec] for spec in servers if spec.role is Role.BOTH]
    pairs = [[*prefill[i : i + 1], *decode[i : i + 1]] for i in range(max(len(prefill), len(decode)))]
    return units + pairs


def _renewed(spec: Spec, model: str, names: list[str], needs: Mapping[Role, Needs]) -> Spec:
    assert spec.role is not None
    names.append(next_name(spec.role, names))
    return msgspec.structs.replace(with_model(spec, model), name=names[-1], needs=needs[spec.role])


def _needs_of(group: Group, specs: Sequence[Spec]) -> dict[Role, Needs]:
    """Return what servers with other words need. Raises ConfigError if a node cannot run one."""
    found: dict[Role, Needs] = {}
    for spec in specs:
        if spec.role is None or spec.role in found:
            continue
        nodes = [node for node in group.rays.nodes() if node.total_cpus > 0]
        facts = group.rays.survey(nodes, lambda node, spec=spec: _question(node, spec))  # type: ignore[misc]
        refuse_unlike_nodes(nodes, facts, platform.python_version())
        memory_bytes = max(facts[node.id].memory_bytes for node in nodes)
        found[spec.role] = msgspec.structs.replace(spec.needs, memory_bytes=memory_bytes)
    return found


def _question(node: Node, spec: Spec) -> Survey:
    words = (*spec.words, f"--host={spec.host or node.address}")
    return Survey(words=words, share=1, num_cpus=node.total_cpus, memory_bytes=int(node.memory_bytes))


def _start(group: Group, specs: Sequence[Spec], like: Sequence[Spec], timeout_s: float) -> None:
    """Start servers, and wait for them; they are ended if one fails. Those like others have the weights of these."""
    for spec in specs:
        sibling = next((other for other in like if other.role is spec.role), None)
        if sibling is not None:
            remember_update(spec.name, recall_update(sibling.name))
    nodes = group.rays.nodes()
    for status in group.statuses().values():
        _count(status, nodes)
    try:
        group.start_servers(specs, in_pairs=any(spec.group for spec in specs), nodes=nodes)
        group.wait_ready([spec.name for spec in specs], timeout_s)
    except BaseException:
        group.end(specs)
        raise


def _count(status: Status | str, nodes: Sequence[Node]) -> None:
    if not isinstance(status, str) and status.role is not None:
        for node in nodes:
            node.num_servers += node.address == status.node_address


def _add_timeout(parser: Parser) -> None:
    parser.option(
        "--ready-timeout", type=number(1), default=READY_TIMEOUT_S, metavar="S", help="longest wait for a server"
    )
    add_address(parser)
