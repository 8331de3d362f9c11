"""`forebay serve --pd local`: prefill and decode servers and their router, all of this machine, as one server."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import uvloop

from forebay.base.log import setup_logging
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parsed
from forebay.cli.startup_table import print_ready, tenants_section
from forebay.config.config import Config
from forebay.config.disaggregation import faults_of_messages, loads_drafter, num_servers
from forebay.config.engine_config import DisaggregationMode
from forebay.config.flag import Value
from forebay.config.keys import ApiKey
from forebay.config.server_args import BY_NAME
from forebay.http.listen import bind, fit_file_limit, listen
from forebay.route.app import create_app
from forebay.route.fleet import BACKLOG, Fleet, Server
from forebay.route.members import Members
from forebay.route.router import Router

KEY_BYTES: Final = 32
# What is the router's alone, and what is divided among its servers.
_OURS: Final = frozenset(
    {
        *("pd", "chaos", "report", "host", "port", "cors_origins", "allowed_hosts", "model_path", "cluster_key_file"),
        *("api_key", "api_key_file", "admin_api_key", "admin_api_key_file"),
        *("num_threads", "kv_cache_bytes", "mem_fraction_static", "retraction_host_bytes"),
        "host_cache_bytes",
        *("disaggregation_bootstrap_port",),
    }
)
_OF_DECODE: Final = frozenset(
    {
        *("disaggregation_decode_extra_slots", "disaggregation_decode_enable_radix_cache"),
        *("num_reserved_decode_tokens",),
    }
)


def serve_fleet(parsed: Parsed, config: Config) -> int:
    """Start prefill and decode servers and route to them until a signal; return the exit code."""
    started = time.monotonic()
    setup_logging(config.server.log_level, process="router", format=config.server.log_format)
    sock = bind(config.server)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the server takes it
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, fleet_of(parsed.values, config), sock, started))
    return 0


async def _serve(config: Config, fleet: Fleet, sock: socket.socket, started: float) -> None:
    server = fit_file_limit(replace(config.server, cluster_key=fleet.cluster_key))
    key = server.api_keys[0] if server.api_keys else ""
    members = Members(fleet.urls(), api_key=key, cluster_key=fleet.cluster_key)
    router = Router(server, members)
    router.spawn(members.health.watch())

    async def print_when_ready(url: str) -> None:
        while not members.ready:
            await asyncio.sleep(0.05)
        _print_startup(config, fleet, url, time.monotonic() - started)

    app = create_app(router)
    with fleet:  # inside the loop, whose threads wait for its processes
        fleet.watch(router)
        on_ready = lambda url: router.spawn(print_when_ready(url))  # noqa: E731
        await listen(server, app, router.lifecycle, router, sock=sock, on_ready=on_ready)


def fleet_of(written: Mapping[str, Value], config: Config) -> Fleet:
    """The servers of `--pd`, with the settings written for them and their share of threads and memory. They prove to
    each other a key that is made here, and accept the keys of our clients; both are in files without names."""
    prefill, decode = num_servers(config.server.pd)
    cluster_key = secrets.token_hex(KEY_BYTES)
    key_file = _file(cluster_key)
    keys = {name: _file("\n".join(found)) for name, found in _key_lines(config) if found}
    roles = [DisaggregationMode.PREFILL] * prefill + [DisaggregationMode.DECODE] * decode
    shared = [
        f"--cluster-key-file=/dev/fd/{key_file}",
        *(f"{BY_NAME[name].option}=/dev/fd/{fd}" for name, fd in keys.items()),
        *_shares(config, len(roles)),
    ]
    servers = [Server(role, [*_words(role, written, config), *shared], _listening()) for role in roles]
    return Fleet(servers, cluster_key.encode(), [key_file, *keys.values()], config.engine.disaggregation.chaos)


def _key_lines(config: Config) -> Iterator[tuple[str, Sequence[str]]]:
    """With names and weights: each server shares itself out by them. With receipts: each server makes its own."""
    names, weights, receipts = config.server.key_names, config.server.tenants, config.server.receipt_tenants

    def lines(keys: Sequence[str]) -> list[str]:
        return [ApiKey(key, names[key], weights[names[key]], names[key] in receipts).line for key in keys]

    yield "api_key_file", lines(config.server.api_keys)
    yield "admin_api_key_file", lines(config.server.admin_api_keys)


def threads_each(config: Config, num: int) -> int:
    """Divide the cores of the machine by `num` servers, at least one each."""
    return max(1, config.engine.num_threads // num)


def _shares(config: Config, num: int) -> list[str]:
    return [
        f"--num-threads={threads_each(config, num)}",
        f"--kv-cache-bytes={config.engine.memory.kv_cache_bytes // num}",
        f"--retraction-host-bytes={config.engine.kinds.retraction_host_bytes // num}",
        f"--host-cache-bytes={config.engine.tiers.host_cache_bytes // num}",
    ]


def _words(role: DisaggregationMode, written: Mapping[str, Value], config: Config) -> list[str]:
    words = [f"--model-path={config.engine.model_path}"]
    if role is DisaggregationMode.PREFILL:
        words.append("--disaggregation-bootstrap-port=0")
    if faults := faults_of_messages(config.engine.disaggregation.chaos):
        words.append(f"--chaos={faults}")
    return [*words, *words_of_role(role, written, _OURS)]


def words_of_role(role: DisaggregationMode, written: Mapping[str, Value], without: Collection[str]) -> Iterator[str]:
    """Yield the words of `forebay serve` for a prefill or decode server: its role and the settings that it may have,
    but for those in `without`."""
    yield f"--disaggregation-mode={role}"
    guessing = loads_drafter({"disaggregation_mode": role, **written})
    for name, value in written.items():
        others = name in _OF_DECODE if role is DisaggregationMode.PREFILL else name == "disable_radix_cache"
        guesses = name.startswith("speculative_") and not guessing
        if name not in without and not others and not guesses:
            yield word(name, value)


def word(name: str, value: Value) -> str:
    """Return a setting as one word of a command line."""
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    return f"{BY_NAME[name].option}={text.lower() if isinstance(value, bool) else text}"


def _file(text: str) -> int:
    """Return a descriptor of a file without a name that contains the text, for this process and its children only."""
    fd = os.memfd_create("forebay-key", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, text.encode())
    return fd


def _listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    sock.setblocking(False)
    return sock


def _print_startup(config: Config, fleet: Fleet, url: str, seconds: float) -> None:
    num, threads = len(fleet.servers), config.engine.num_threads
    memory = human_bytes(config.engine.memory.kv_cache_bytes // num)
    each = f"{threads_each(config, num)} of {threads} threads and {memory} of the caches' memory"
    servers = [(str(server.role), server.origin, f"{each}: {num} share this machine") for server in fleet.servers]
    model = f"{config.engine.served_model_name} by {config.server.pd}"
    shares = [("servers", servers), *tenants_section(config.server)]
    print_ready(url, seconds, [("model", model, "")], shares)
