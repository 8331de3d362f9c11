"""`forebay route`: one endpoint before servers that run already, of both roles or of one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger, setup_logging
from forebay.base.relay import Relay
from forebay.cli.arguments import Parsed, Parser, whole
from forebay.config.config import ServerConfig

_ROLES: Final = {
    "server": "a server of both roles, such as http://10.0.0.1:30000; may be given several times",
    "prefill": "a prefill server; may be given several times",
    "decode": "a decode server; may be given several times",
}


log = get_logger("router")

_HOW_TO_ADD: Final = "Give --server URL, or --prefill URL and --decode URL"


def run(words: Sequence[str], sock: socket.socket | None = None) -> int:
    """Run the router until a signal; return the exit code. `sock` listens already, in the place of --host and
    --port."""
    summary = (
        "Send each request to a server that has the beginning of its prompt cached, or has least to do.\n"
        "With --prefill and --decode, send its prompt to a prefill server and have a decode server answer it."
    )
    parser = Parser("route", summary, "[--server URL...] [--prefill URL... --decode URL...] [options]")
    for role, help in _ROLES.items():
        parser.option(f"--{role}", action="append", metavar="URL", help=help)
    selection_options(parser)
    parser.option("--standby", default="", metavar="URL", help="another router, which is sent the prefix table")
    parser.server_flags()
    parsed = parser.parse(words)
    config = parsed.resolve_server()
    _check_servers(parsed, config)
    setup_logging(config.log_level, process="router", format=config.log_format)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_route(config, parsed, sock))
    return 0


def selection_options(parser: Parser) -> None:
    """Add the options of how servers are selected."""
    from forebay.route.selection import BALANCE_ABS_THRESHOLD, Policy

    parser.option(
        "--policy",
        default=str(Policy.CACHE_AWARE),
        choices=tuple(Policy),
        metavar="NAME",
        help=f"how the server that computes a prompt is selected: {', '.join(Policy)}",
    )
    parser.option(
        "--balance-abs-threshold",
        type=whole(1, 1 << 20),
        default=BALANCE_ABS_THRESHOLD,
        metavar="N",
        help="a server with a cached prefix is not selected if it has N requests more than the least busy one",
    )


def _check_servers(parsed: Parsed, config: ServerConfig) -> None:
    own = parsed.own
    if bool(own.prefill) != bool(own.decode):
        raise ConfigError("give at least one --prefill URL and one --decode URL, or neither of them")
    if not (own.server or own.prefill or config.cluster_key) and (config.api_keys or config.admin_api_keys):
        raise ConfigError(
            "the router has no servers: give --server URL, or --prefill URL and --decode URL; or give "
            "--cluster-key-file FILE, with which servers announce themselves"
        )


def _say(text: str) -> None:
    """Print a line, or log it if the log is JSON."""
    if Relay.running is None:
        print(text, flush=True)
    else:
        log.info(event("routing", text=text))


async def _route(config: ServerConfig, parsed: Parsed, sock: socket.socket | None) -> None:
    from forebay.http.listen import fit_file_limit, listen
    from forebay.route.announcement import Role
    from forebay.route.app import create_app
    from forebay.route.members import Members
    from forebay.route.router import Router
    from forebay.route.selection import Policy, Selection
    from forebay.route.standby import Standby

    own = parsed.own
    config = fit_file_limit(config)
    urls: Mapping[Role, Sequence[str]] = {
        Role.BOTH: own.server or (),
        Role.PREFILL: own.prefill or (),
        Role.DECODE: own.decode or (),
    }
    members = Members(
        urls,
        api_key=config.api_keys[0] if config.api_keys else "",
        cluster_key=config.cluster_key,
        selection=Selection(Policy(own.policy), own.balance_abs_threshold),
    )
    router = Router(config, members)
    router.spawn(members.health.watch())
    if own.standby:
        standby = Standby(own.standby, members.prefixes, config.cluster_key, router.metrics, router_id=router.id)
        router.spawn(standby.run())
    app = create_app(router)
    has_servers = bool(own.server or own.prefill)

    def on_ready(url: str) -> None:
        _say(f"routing at {url}")
        if not has_servers:
            _say(f"no server yet: requests are answered by 503 until one announces itself. {_HOW_TO_ADD}")

    await listen(config, app, router.lifecycle, router, sock=sock, inherited=sock is not None, on_ready=on_ready)
