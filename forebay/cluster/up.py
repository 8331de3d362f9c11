"""`forebay cluster up` and `down`."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from forebay.base.cpu import PROC
from forebay.base.errors import ConfigError, Unavailable
from forebay.base.exposure import is_unspecified
from forebay.cli.arguments import Parser
from forebay.cluster import local
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, Needs, Spec, Start, Survey
from forebay.cluster.options import ROUTER_BYTES, UpOptions, add_address, next_name, read_options, roles_of, up_parser
from forebay.cluster.placement import Node, no_room
from forebay.cluster.rays import Rays
from forebay.cluster.security import is_one_machine, ports_text, refuse_open_cluster, refuse_unlike_nodes
from forebay.route.announcement import Role

LOOPBACK: Final = "127.0.0.1"
ROUTER_TIMEOUT_S: Final = 60.0
PROGRESS_S: Final = 10.0


def report(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


@contextlib.contextmanager
def progress_of(what: str, print_line: Callable[[str], None] = report, every_s: float = PROGRESS_S) -> Iterator[None]:
    """Print the reason for waiting again and again, for the length of a `with` block."""
    begin, done = time.monotonic(), threading.Event()

    def report_until_done() -> None:
        while not done.wait(every_s):
            print_line(f"still waiting for {what}, {time.monotonic() - begin:.0f} s so far")

    thread = threading.Thread(target=report_until_done, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def connected(address: str, *, may_start: bool = False) -> Iterator[Group]:
    """Connect to the cluster that a command means, for the length of a `with` block."""
    with progress_of("Ray to answer"):
        rays = Rays(local.connect_address(address, may_start=may_start))
    try:
        yield Group(rays, report)
    finally:
        rays.close()


def up(words: Sequence[str]) -> None:
    """Start servers and routers, and wait until they are ready."""
    started = time.monotonic()
    options = read_options(up_parser().parse(words))
    with connected(options.address, may_start=True) as group:
        if names := group.rays.actors():
            if unfinished := group.rays.unfinished_start():
                raise ConfigError(" ".join(unfinished_lines(unfinished, names)))
            raise ConfigError(f"{', '.join(names)} run here already: use forebay cluster scale, update or down")
        nodes = group.rays.nodes()
        one_machine = is_one_machine(nodes, group.rays.here)
        if one_machine and not options.cluster_key_file:
            options = replace(options, cluster_key_file=str(local.key_file("cluster.key")))
        facts = check_nodes(group, options, nodes, one_machine=one_machine)
        routers = routers_of(options, nodes, group.rays.here, one_machine=one_machine)
        servers = servers_of(options, nodes, facts, [url_of(spec) for spec in routers], one_machine=one_machine)
        start(group, options, nodes, routers, servers)
        for node in nodes:
            report(ports_text(node.hostname, facts[node.id].listeners))
        urls = ", ".join(map(url_of, reversed(routers)))
        report(f"ready at {urls} in {time.monotonic() - started:.1f} s")


def check_nodes(group: Group, options: UpOptions, nodes: Sequence[Node], *, one_machine: bool) -> Mapping[str, Facts]:
    """Return the facts of all nodes. Raises ConfigError, before anything starts, if the cluster is open to strangers or
    a node cannot run a server."""
    able = [node for node in nodes if node.total_cpus > 0]
    if not able:
        raise Unavailable(no_room("a server", Needs(num_cpus=1), nodes), code="no_room")
    share = share_of(options, len(able))
    role = next(iter(options.counts))

    def request(node: Node) -> Survey:
        return Survey(
            words=(*options.words_to_plan(role), f"--host={LOOPBACK if one_machine else node.address}"),
            share=share if node in able else 0,
            num_cpus=node.num_cpus,
            memory_bytes=int(max(0.0, node.memory_bytes - ROUTER_BYTES)),
            key_files=options.key_files,
            cluster_key_file=options.cluster_key_file,
        )

    with progress_of(f"the check of {', '.join(node.hostname for node in nodes)}"):
        facts = group.rays.survey(nodes, request)
    if not one_machine:
        refuse_open_cluster(nodes, facts, options.cluster_key_file)
    refuse_unlike_nodes(nodes, facts, platform.python_version())
    return facts


def share_of(options: UpOptions, num_nodes: int) -> int:
    """Return how many servers the fullest node has: its CPUs and memory are divided by it."""
    size = 2 if options.needs_one_node else 1
    return -(-options.num_servers // (size * num_nodes)) * size


def routers_of(options: UpOptions, nodes: Sequence[Node], here: str, *, one_machine: bool) -> list[Spec]:
    """Return the routers, the standby first. The active one is on this machine, if that is a node."""
    first = next((node for node in nodes if node.address == here), nodes[0])
    host = LOOPBACK if one_machine else first.address
    if not options.standby:
        return [options.router("router-1", host=host, node_address=first.address, standby="")]
    other = next((node for node in nodes if node.address != first.address), first)
    beside = options.router(
        "router-2", host=LOOPBACK if one_machine else other.address, node_address=other.address, standby=""
    )
    if other.address == first.address:
        beside = beside_on_one_machine(beside)
    return [beside, options.router("router-1", host=host, node_address=first.address, standby=url_of(beside))]


def beside_on_one_machine(spec: Spec) -> Spec:
    """Return a router's spec with the next port."""
    words = tuple(word for word in spec.words if not word.startswith("--port="))
    return msgspec.structs.replace(spec, port=spec.port + 1, words=(*words, f"--port={spec.port + 1}"))


def url_of(router: Spec) -> str:
    """Return the address at which clients and servers reach a router."""
    host = router.node_address if is_unspecified(router.host) else router.host
    return f"http://[{host}]:{router.port}" if ":" in host else f"http://{host}:{router.port}"


def servers_of(
    options: UpOptions, nodes: Sequence[Node], facts: Mapping[str, Facts], routers: Sequence[str], *, one_machine: bool
) -> list[Spec]:
    """Return the servers, all with the resources that the smallest node has for one."""
    least = min((facts[node.id] for node in nodes if node.total_cpus > 0), key=lambda found: found.memory_bytes)
    threads = min(facts[node.id].num_threads for node in nodes if node.total_cpus > 0)
    needs = Needs(num_cpus=float(threads), memory_bytes=least.memory_bytes, num_gpus=options.num_gpus)
    names: list[str] = []
    specs = []
    for role in roles_of(options.counts):
        names.append(next_name(role, names))
        specs.append(
            options.server(
                names[-1],
                role,
                host=LOOPBACK if one_machine else "",
                needs=needs,
                kv_cache_bytes=least.kv_cache_bytes,
                routers=routers,
            )
        )
    return specs


def start(
    group: Group, options: UpOptions, nodes: Sequence[Node], routers: Sequence[Spec], servers: Sequence[Spec]
) -> None:
    """Start routers and servers, and wait for them. The started ones are ended if one of them fails, or on Ctrl-C."""
    for router in routers:
        for node in nodes:
            if node.address == router.node_address:
                node.memory_bytes -= router.needs.memory_bytes
                break
    done = contextlib.ExitStack()
    done.callback(lambda: group.rays.remember_start(None))
    done.callback(lambda: group.end([*servers, *routers]))
    with done:
        names = tuple(spec.name for spec in (*servers, *routers))
        group.rays.remember_start(Start(hostname=platform.node(), pid=os.getpid(), names=names))
        group.start_servers(servers, in_pairs=options.needs_one_node, nodes=nodes)
        for router in routers:
            group.rays.create(router, "")
        for each, timeout_s in (
            ([router.name for router in routers], ROUTER_TIMEOUT_S),
            ([server.name for server in servers], options.ready_timeout_s),
        ):
            with progress_of(f"{', '.join(each)} to be ready"):
                group.wait_ready(each, timeout_s)
        group.rays.remember_start(None)
        done.pop_all()


def unfinished_lines(start: Start, running: Sequence[str]) -> list[str]:
    """Return what an `up` that has not finished has started, and what to do."""
    missing = [name for name in start.names if name not in running]
    state = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing" if missing else "none is missing"
    command = f"forebay cluster up (pid {start.pid} on {start.hostname})"
    if start.hostname == platform.node() and not (PROC / str(start.pid)).exists():
        what, condition = f"{command} was cut before it had finished", ""
    else:
        what, condition = f"{command} has not finished", "wait for it; if it no longer runs: "
    return [
        f"{what}: of {', '.join(start.names)}, {state}",
        f"{condition}end what it has started with forebay cluster down, then start again with forebay cluster up",
    ]


def down(words: Sequence[str]) -> None:
    """Drain and end all servers, then the routers, then Forebay's own Ray."""
    parser = Parser("cluster down", "Drain all servers, end them and their routers.", "[options]")
    add_address(parser)
    parser.option("--now", action="store_true", help="end requests that run, too")
    own = parser.parse(words).own
    head = None if own.address else local.started()
    try:
        _end_all(own.address, drains=not own.now)
    except Exception as error:  # of Ray's own kinds, too: its processes can be ended without it
        if head is None:
            raise
        report(f"Ray does not answer ({_first_line(error)}): all servers end with it, without a drain")
    if head is not None:
        local.stop(head)
        report("Ray has ended")


def _end_all(address: str, *, drains: bool) -> None:
    with connected(address) as group:
        names = group.rays.actors()
        outcomes = group.rays.call_all(names, "spec")
        specs = [as_spec(name, outcomes[name].value) for name in names]
        if drains:
            group.drain([spec for spec in specs if spec.role is not None])
        group.end(specs)
        group.rays.remember_start(None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def as_spec(name: str, data: bytes) -> Spec:
    """Return an actor's spec; of one that does not answer, enough to end it."""
    if data:
        return msgspec.msgpack.decode(data, type=Spec)
    role = None if name.startswith("router-") else Role.BOTH
    return Spec(name=name, role=role, words=(), needs=Needs(num_cpus=0), host="")
