"""The options of `forebay cluster up`, and the servers and routers that they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parsed, Parser, names_without_engine, number, whole
from forebay.cli.local_fleet import word, words_of_role
from forebay.cli.route import selection_options
from forebay.cluster.messages import Needs, Spec
from forebay.config.engine_config import DisaggregationMode, TransferBackend
from forebay.config.flag import PATH, SECRET, Value
from forebay.config.server_args import BY_NAME
from forebay.route.announcement import Role

MAX_SERVERS: Final = 64
READY_TIMEOUT_S: Final = 1800.0  # a large checkpoint on a disk of the network
ROUTER_CPUS: Final = 0.0  # its work is short beside that of servers, whose cores are their own
ROUTER_BYTES: Final = 256 << 20
DEFAULT_PORT: Final = 30000
# Settings of the router, and those that the placement decides.
_OURS: Final = frozenset({"pd", "chaos", "host", "port", "cors_origins", "num_threads", "kv_cache_bytes"})
_FILES: Final = ("api_key_file", "admin_api_key_file", "cluster_key_file")
_MODES: Final = {Role.PREFILL: DisaggregationMode.PREFILL, Role.DECODE: DisaggregationMode.DECODE}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """The options of `up`. `counts` has the number of servers of each role, `values` the settings of servers."""

    counts: Mapping[Role, int]
    values: Mapping[str, Value]
    address: str
    standby: bool
    ready_timeout_s: float
    num_gpus: float
    cluster_key_file: str
    router_options: tuple[str, ...] = ()

    @property
    def num_servers(self) -> int:
        return sum(self.counts.values())

    @property
    def needs_one_node(self) -> bool:
        """Return whether a prefill server must share memory with its decode server."""
        return self.values.get("disaggregation_transfer_backend") == TransferBackend.SHM

    @property
    def key_files(self) -> tuple[str, ...]:
        return tuple(str(self.values[name]) for name in _FILES[:2] if name in self.values)

    def words(self, role: Role) -> tuple[str, ...]:
        """Return the words of `forebay serve` for a server of this role, without what the placement decides."""
        key = f"--cluster-key-file={self.cluster_key_file}"
        if role is not Role.BOTH:
            return (*words_of_role(_MODES[role], self.values, _OURS | {"cluster_key_file"}), key)
        words = [word(name, value) for name, value in self.values.items() if name not in _OURS | {_FILES[2]}]
        return (*words, key) if self.cluster_key_file else tuple(words)

    def words_to_plan(self, role: Role) -> tuple[str, ...]:
        """Return the words with which a node plans one server: with the sizes that were written."""
        sizes = [word(name, self.values[name]) for name in ("num_threads", "kv_cache_bytes") if name in self.values]
        return (*self.words(role), *sizes)

    def router_words(self) -> tuple[str, ...]:
        """Return the words of `forebay route`."""
        names = names_without_engine() - {"host", "port", "cluster_key_file", "allowed_hosts"}
        words = [word(name, value) for name, value in self.values.items() if name in names]
        return (*words, *self.router_options, f"--cluster-key-file={self.cluster_key_file}")

    def router(self, name: str, *, host: str, node_address: str, standby: str) -> Spec:
        """Return the spec of a router that listens on `host` and stays on a node."""
        port = int(str(self.values.get("port", DEFAULT_PORT)))
        listens = str(self.values.get("host", host))
        hosts = self.values.get("allowed_hosts", ())
        hosts = (*(hosts if isinstance(hosts, tuple) else (str(hosts),)), node_address)  # by which servers announce
        beside = (f"--standby={standby}",) if standby else ()
        words = (*self.router_words(), f"--host={listens}", f"--port={port}", word("allowed_hosts", hosts), *beside)
        return Spec(
            name=name,
            role=None,
            words=words,
            needs=Needs(num_cpus=ROUTER_CPUS, memory_bytes=ROUTER_BYTES),
            host=listens,
            port=port,
            node_address=node_address,
            drain_timeout_s=self.drain_timeout_s,
            api_key_file=str(self.values.get("api_key_file", "")),
        )

    @property
    def drain_timeout_s(self) -> float:
        """Seconds that running requests have when a server is drained."""
        value = self.values.get("drain_timeout", BY_NAME["drain_timeout"].default)
        return float(str(value))

    def server(
        self, name: str, role: Role, *, host: str, needs: Needs, kv_cache_bytes: int, routers: Sequence[str]
    ) -> Spec:
        """Return the spec of a server that listens on `host`, or on its node's address if that is empty."""
        threads = int(needs.num_cpus)
        own = (f"--num-threads={threads}", f"--kv-cache-bytes={kv_cache_bytes}")
        return Spec(
            name=name,
            role=role,
            words=(*self.words(role), *own),
            needs=needs,
            host=host,
            routers=tuple(routers),
            cluster_key_file=self.cluster_key_file,
            api_key_file=str(self.values.get("api_key_file", "")),
            admin_api_key_file=str(self.values.get("admin_api_key_file", "")),
            drain_timeout_s=self.drain_timeout_s,
        )


def add_address(parser: Parser) -> None:
    """Add the option that every command has."""
    parser.option(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="the Ray cluster, as for ray.init; auto finds the one of this machine",
        default_text="one of Forebay's own, on this machine",
    )


def up_parser() -> Parser:
    """Return the parser of `forebay cluster up`, which has the options of `forebay serve` too."""
    summary = (
        "Start servers and their router on a Ray cluster. Ray places and restarts the processes; requests go through\n"
        "the router alone."
    )
    parser = Parser("cluster up", summary, "[MODEL] [--replicas N | --pd 2p2d] [options as for serve]")
    parser.option("--replicas", type=whole(1, MAX_SERVERS), metavar="N", help="servers of whole requests")
    parser.option("--pd", default="", metavar="NpMd", help="prefill and decode servers, such as 2p2d")
    add_address(parser)
    parser.option("--standby", action="store_true", help="start a second router, on another node if there is one")
    parser.option(
        "--ready-timeout", type=number(1), default=READY_TIMEOUT_S, metavar="S", help="longest wait for the servers"
    )
    selection_options(parser)
    parser.engine_flags(server=True, model_is_positional=True, without=("pd",))
    parser.accept_foreign()
    return parser


def read_options(parsed: Parsed) -> UpOptions:
    """Return the options of `up`. Raises ConfigError for a key that is no file, and for options that clash."""
    own, values = parsed.own, {name: absolute(name, value) for name, value in parsed.values.items()}
    refuse_secrets(values)
    for name in ("disaggregation_mode", "disaggregation_bootstrap_port", "disaggregation_prefill_servers"):
        if name in values:
            raise ConfigError(f"{BY_NAME[name].option} is set for each server of --pd: leave it out")
    if own.pd and own.replicas is not None:
        raise ConfigError("--replicas and --pd exclude each other: a server has whole requests, or one role")
    values.pop("pd", None)
    counts = counts_of(own.pd) if own.pd else {Role.BOTH: own.replicas or 1}
    if "kv_events" in values and sum(counts.values()) > 1:
        raise ConfigError(
            f"--kv-events: {sum(counts.values())} servers cannot all listen at one address: leave it out, the router "
            "does without, or start each server with forebay serve and a port of its own"
        )
    return UpOptions(
        counts=counts,
        values=values,
        address=own.address,
        standby=own.standby,
        ready_timeout_s=own.ready_timeout,
        num_gpus=1.0 if values.get("device") == "cuda" else 0.0,
        cluster_key_file=str(values.get("cluster_key_file", "")),
        router_options=(f"--policy={own.policy}", f"--balance-abs-threshold={own.balance_abs_threshold}"),
    )


def counts_of(text: str) -> dict[Role, int]:
    """Read `2p2d`. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,2})p([0-9]{1,2})d", text.strip().lower())
    if found is None or not 1 <= int(found[1]) <= MAX_SERVERS or not 1 <= int(found[2]) <= MAX_SERVERS:
        raise ConfigError(f"--pd {text!r} is not a set of servers: write 1p1d or 2p2d, at most {MAX_SERVERS} each")
    return {Role.PREFILL: int(found[1]), Role.DECODE: int(found[2])}


def refuse_secrets(values: Mapping[str, Value]) -> None:
    """Raise ConfigError for a key: Ray would store it with the arguments of actors."""
    for name in values:
        if BY_NAME[name].kind is SECRET:
            raise ConfigError(
                f"{BY_NAME[name].option}: Ray would store the key with an actor's arguments. Write it to a file, at "
                f"the same path on every node, and give {BY_NAME[name].option}-file FILE"
            )


def absolute(name: str, value: Value) -> Value:
    """Return a path of a file or folder that exists here as an absolute one: actors run in other folders."""
    if BY_NAME[name].kind is PATH and Path(str(value)).exists():
        return str(Path(str(value)).absolute())
    return value


def roles_of(counts: Mapping[Role, int]) -> Iterator[Role]:
    """Yield the roles of all servers in the order in which they are started: pairs first."""
    left = dict(counts)
    while any(left.values()):
        for role in left:
            if left[role]:
                left[role] -= 1
                yield role


def next_name(role: Role, names: Sequence[str]) -> str:
    """Return the first free name of a server: `server-1`, `prefill-1`, `decode-1`, and so on."""
    prefix = "server" if role is Role.BOTH else str(role)
    taken = {int(found[1]) for name in names if (found := re.fullmatch(rf"{prefix}-(\d+)", name))}
    return f"{prefix}-{max(taken, default=0) + 1}"


def with_model(spec: Spec, model: str) -> Spec:
    """Return the spec of a server with another model."""
    option = BY_NAME["model_path"].option
    kept = tuple(word for word in spec.words if not word.startswith(f"{option}="))
    return msgspec.structs.replace(spec, words=(f"{option}={absolute('model_path', model)}", *kept))
