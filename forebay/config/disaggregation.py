"""Settings of prefill and decode instances: flags, what "auto" becomes, and what clashes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from forebay.base.errors import ConfigError
from forebay.base.exposure import is_loopback
from forebay.config import kinds
from forebay.config.config import Config
from forebay.config.engine_config import (
    Chaos,
    DisaggregationMode,
    DisaggregationOptions,
    SpeculativeAlgorithm,
    TransferBackend,
)
from forebay.config.flag import (
    BOOL,
    COUNT,
    LIST,
    PATH,
    SECONDS,
    TEXT,
    Auto,
    Decision,
    Flag,
    Kind,
    Settled,
    Value,
    in_group,
)

GROUP: Final = "prefill and decode on servers of their own"
PREFIX: Final = "disaggregation_"
DEFAULTS: Final = DisaggregationOptions()
# Up to so many requests that run, twice as many more may be on their way: their KV is small beside what runs.
FEW_RUNNING: Final = 32
_MOST_SERVERS: Final = 64
MAX_PORT: Final = 65535
_KEEP_KV: Final = tuple(str(algorithm) for algorithm in SpeculativeAlgorithm if algorithm.keeps_kv)
_SHARES: Final = ("drop", "double", "reorder", "alter")
_CHAOS_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def _parse_pd(text: str) -> Value:
    """`local` is `local:1p1d`."""
    word = text.strip().lower()
    found = re.fullmatch(r"local(?::([0-9]{1,3})p([0-9]{1,3})d)?", word)
    counts = (1, 1) if found is None or found[1] is None else (int(found[1]), int(found[2]))
    if found is None or not all(1 <= count <= _MOST_SERVERS for count in counts):
        raise ConfigError(f"{text!r} is not a set of servers: write local, local:1p1d or local:2p2d")
    return "local:{}p{}d".format(*counts)


def num_servers(pd: str) -> tuple[int, int]:
    """Prefill and decode servers of a value of `--pd`."""
    prefill, decode = re.findall("[0-9]+", pd)
    return int(prefill), int(decode)


def num_engines(settled: Mapping[str, object]) -> int:
    """Return the number of engines that share this machine: several with `--pd`."""
    return sum(num_servers(str(settled["pd"]))) if "pd" in settled else 1


def _parse_chaos(text: str) -> Value:
    chaos_of(text)
    return text.strip()


def chaos_of(text: str) -> Chaos:
    """`drop=1%,delay=50ms,kill-prefill=30s`."""
    values: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, amount = part.partition("=")
        unit = r"%" if name in _SHARES else "|".join(_CHAOS_UNITS)
        found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({unit})", amount)
        if found is None or name not in (*_SHARES, "delay", "kill-prefill", "kill-decode"):
            raise ConfigError(
                f"{part!r} is no fault: write {', '.join(f'{share}=1%' for share in _SHARES)}, delay=50ms, "
                "kill-prefill=30s or kill-decode=30s, with commas between several"
            )
        if name in _SHARES:
            values[name] = float(found[1]) / 100
        else:
            values[f"{name.replace('-', '_')}_s"] = float(found[1]) * _CHAOS_UNITS[found[2]]
        if values.get(name, 0.0) > 1:
            raise ConfigError(f"{part!r}: there are no more than 100% of messages")
    return Chaos(
        drop=values.get("drop", 0.0),
        double=values.get("double", 0.0),
        reorder=values.get("reorder", 0.0),
        alter=values.get("alter", 0.0),
        delay_s=values.get("delay_s", 0.0),
        kill_prefill_s=values.get("kill_prefill_s", 0.0),
        kill_decode_s=values.get("kill_decode_s", 0.0),
    )


def faults_of_messages(chaos: Chaos) -> str:
    """As `chaos_of` reads it, without the processes to kill."""
    shares = [f"{name}={100 * share:g}%" for name in _SHARES if (share := getattr(chaos, name))]
    return ",".join([*shares, *([f"delay={1000 * chaos.delay_s:g}ms"] if chaos.delay_s else [])])


FLAGS: Final = in_group(
    GROUP,
    Flag(
        "disaggregation_mode",
        TEXT,
        "which half of requests is computed here: null, both; prefill, prompts; decode, what follows them",
        default=DisaggregationMode.NULL.value,
        choices=tuple(DisaggregationMode),
    ),
    Flag(
        "disaggregation_transfer_backend",
        TEXT,
        "how what layers keep of a prompt comes to decode; auto: shm on one machine, else tcp",
        choices=tuple(TransferBackend),
    ),
    Flag(
        "disaggregation_bootstrap_port",
        COUNT,
        "port on which a prefill server listens for decode servers, 0 for any",
        default=DEFAULTS.bootstrap_port,
        low=0,
        high=65535,
    ),
    Flag(
        "disaggregation_bootstrap_timeout",
        SECONDS,
        "longest wait of a request for its other half",
        default=DEFAULTS.bootstrap_timeout_s,
        low=0.05,
    ),
    Flag(
        "disaggregation_lease",
        SECONDS,
        "longest silence of a transfer",
        default=DEFAULTS.lease_s,
        low=0.05,
    ),
    Flag(
        "disaggregation_heartbeat",
        SECONDS,
        "time between two signs of life of a server; one that misses three is taken for dead",
        default=DEFAULTS.heartbeat_s,
        low=0.05,
        high=60.0,
    ),
    Flag(
        "disaggregation_decode_extra_slots",
        COUNT,
        "requests beyond --max-running-requests whose prompts may arrive while as many as that run",
        low=0,
        high=65536,
    ),
    Flag(
        "num_reserved_decode_tokens",
        COUNT,
        "tokens that a request has room for before its prompt is sent for",
        default=DEFAULTS.num_reserved_decode_tokens,
        low=1,
        high=1 << 20,
    ),
    Flag(
        "disaggregation_decode_enable_radix_cache",
        BOOL,
        "keep a prefix cache on a decode server; what is in it is not transferred again",
        default=False,
    ),
    Flag("cluster_key_file", PATH, "a file with the key that servers with one role, and their gateways, prove to have"),
    Flag(
        "insecure_no_cluster_key",
        BOOL,
        "let a server with one role run without a cluster key, on 127.0.0.1: any process of this machine is a peer",
        default=False,
    ),
    Flag(
        "disaggregation_prefill_servers",
        LIST,
        "HOST:PORT of the transfers of prefill servers that requests may name without the cluster key, for gateways "
        "that cannot prove it",
        default=(),
    ),
    Flag("pd", Kind("local[:1p1d]", _parse_pd, str), "prefill, decode and a router of this machine as one server"),
    Flag(
        "chaos",
        Kind("FAULTS", _parse_chaos, str),
        "faults on purpose between servers of this machine: drop=1%,double=1%,reorder=1%,alter=1% of messages and "
        "chunks, delay=50ms of messages, kill-prefill=30s,kill-decode=30s on average",
    ),
)
_OF_DECODE: Final = (
    "disaggregation_decode_extra_slots",
    "disaggregation_decode_enable_radix_cache",
    "num_reserved_decode_tokens",
)


def keeps_tree(values: Mapping[str, object]) -> bool:
    """Return whether the role allows a prefix cache."""
    enabled = values["disaggregation_decode_enable_radix_cache"] is True
    return enabled or role_of(values) is not DisaggregationMode.DECODE


def loads_drafter(values: Mapping[str, object]) -> bool:
    """Return whether a model or a head that guesses is of use: to prefill where it keeps KV, which prompts then
    need."""
    algorithm = str(values.get("speculative_algorithm"))
    return role_of(values) is not DisaggregationMode.PREFILL or algorithm in _KEEP_KV


def role_of(settled: Mapping[str, object]) -> DisaggregationMode:
    """Return the disaggregation mode of the settled flags as an enum."""
    return DisaggregationMode(str(settled["disaggregation_mode"]))


def disable_radix_cache(settled: Settled) -> Decision:
    """Return whether a server of this role keeps no prefix cache."""
    if keeps_tree(settled):
        return Decision(False, "what prompts have in common is computed once")
    return Decision(True, "a decode server keeps no tree: prompts come from prefill, whose cache they are in")


def _extra_slots(facts: object, settled: Settled) -> Decision:
    running = settled.number("max_running_requests")
    if role_of(settled) is not DisaggregationMode.DECODE:
        return Decision(0, "for decode servers")
    if running > FEW_RUNNING:
        return Decision(0, f"{running} that may run hide the wait for one that comes")
    return Decision(2 * running, f"twice the {running} that may run, whose prompts arrive meanwhile")


RULES: Final[Mapping[str, Callable[[object, Settled], Decision]]] = {
    "disaggregation_transfer_backend": lambda facts, settled: Decision(
        TransferBackend.AUTO.value, "shm to a peer on this machine, tcp to any other"
    ),
    "disaggregation_decode_extra_slots": _extra_slots,
}
OPTIONAL: Final = {
    "cluster_key_file": "none: no peers, or any process of this machine",
    "pd": "none: one server",
    "chaos": "none",
}


def overrule(settled: Settled) -> dict[str, str]:
    """Settings that a role changes even if they were written, and why."""
    role = role_of(settled)
    if role is DisaggregationMode.PREFILL:
        if loads_drafter(settled):
            least: dict[str, Value] = {"speculative_num_draft_tokens": 2, "speculative_num_steps": 1}
            settled.update(least)
            return dict.fromkeys(
                least, "a prefill server guesses nothing: it computes what decode's guesses go on from"
            )
        off: dict[str, Value] = {
            "speculative_algorithm": "off",
            "speculative_num_draft_tokens": 1,
            "speculative_num_steps": 0,
        }
        settled.pop("speculative_draft_model_path", None)
        settled.update(off)
        return dict.fromkeys(off, "a prefill server generates one token of a request")
    changed = {}
    for name, (asked, instead) in ({} if keeps_tree(settled) else kinds.WITHOUT_TREE).items():
        if settled.get(name) == asked:
            settled[name] = instead
            changed[name] = f"a decode server keeps no tree, which {asked} is for"
    return changed


_ONE_ADDRESS: Final = (
    "its servers cannot all listen at one address: start each with --disaggregation-mode and a port of its own, and "
    "forebay route"
)


def _clashes_with_pd(role: DisaggregationMode, written: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    if role is not DisaggregationMode.NULL:
        yield "pd", "disaggregation_mode", "the first starts servers of both roles: leave the second out"
    for name in filter(written, ("cluster_key_file", "insecure_no_cluster_key")):
        yield "pd", name, "its servers have a key of their own: leave the second out"
    if written("kv_events"):
        yield "pd", "kv_events", _ONE_ADDRESS


def clashes(given: Mapping[str, object], written: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    """Pairs of settings that cannot both hold, and why; `given` has values by name."""
    role = role_of(given)
    if written("pd"):
        yield from _clashes_with_pd(role, written)
        return
    if role is DisaggregationMode.PREFILL:
        for name in filter(written, _OF_DECODE):
            yield "disaggregation_mode", name, "the second is for decode servers"
    if role is DisaggregationMode.NULL:
        for flag in FLAGS[1:]:
            if written(flag.name) and flag.name != "cluster_key_file":  # by which a router checks any server
                yield flag.name, "disaggregation_mode", "without a role it has no effect: give prefill, decode, or --pd"
    radix, enabled = given["disable_radix_cache"], given["disaggregation_decode_enable_radix_cache"]
    if role is DisaggregationMode.DECODE and not isinstance(radix, Auto) and bool(radix) == bool(enabled):
        yield "disable_radix_cache", "disaggregation_decode_enable_radix_cache", "on a decode server give the second"


def problems(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """One line for each."""
    role = role_of(settled)
    remote = not is_loopback(str(settled["host"]))
    if role is not DisaggregationMode.NULL and "cluster_key_file" not in settled:
        if remote:
            yield (
                f"{asked('host')} and {asked('disaggregation_mode')}: servers and gateways on other machines must "
                "prove who they are: give --cluster-key-file FILE"
            )
        elif not settled["insecure_no_cluster_key"]:
            yield (
                f"{asked('disaggregation_mode')}: whoever has no key could send it caches and requests: give "
                "--cluster-key-file FILE (openssl rand -hex 32 > FILE), the same to all servers and to forebay route; "
                "or --insecure-no-cluster-key if all processes of this machine may"
            )
    for server in cast(Sequence[str], settled.get("disaggregation_prefill_servers", ())):
        try:
            peer_address(server)
        except ConfigError as error:
            yield f"{asked('disaggregation_prefill_servers')}: {error.message}"
    chaos = chaos_of(str(settled.get("chaos", "")))
    if (chaos.kill_prefill_s or chaos.kill_decode_s) and "pd" not in settled:
        yield f"{asked('chaos')}: servers are killed by the one that has started them: use --pd local"
    if "chaos" in settled and remote:
        yield f"{asked('chaos')} and {asked('host')}: faults on purpose are for servers on 127.0.0.1"


def peer_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT` or `[ADDRESS]:PORT`. Raises ConfigError."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z._-]+))(?::([0-9]{1,5}))?", text.strip())
    port = int(found[3] or DEFAULTS.bootstrap_port) if found else 0
    if found is None or not 0 < port <= MAX_PORT:
        raise ConfigError(f"{text[:100]!r} is no server: write HOST:PORT, such as 10.0.0.1:8998")
    return (found[1] or found[2]).lower(), port


def refuse_without_server(command: str, config: Config) -> None:
    """ConfigError for a role of an engine that no gateway can reach."""
    mode, pd = config.engine.disaggregation.mode, config.server.pd
    if mode is not DisaggregationMode.NULL or pd:
        second = f"--pd ({pd})" if pd else f"--disaggregation-mode ({mode})"
        raise ConfigError(
            f"{command} and {second}: half requests come over HTTP, from a gateway: use forebay serve, or leave the "
            "second out"
        )


def field_values(settled: Settled, cluster_key: bytes) -> dict[str, Any]:
    """Return the field values of `DisaggregationOptions`."""
    values = {flag.field.removeprefix(PREFIX): settled[flag.name] for flag in FLAGS if flag.name in settled}
    enums = {"mode": role_of(settled), "transfer_backend": TransferBackend(str(values["transfer_backend"]))}
    return {**values, **enums, "cluster_key": cluster_key, "chaos": chaos_of(str(settled.get("chaos", "")))}
