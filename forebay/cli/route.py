"""`forebay route`: one endpoint before prefill and decode servers that run already."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.base.errors import ConfigError
from forebay.base.http_client import Origin
from forebay.base.log import setup_logging
from forebay.cli.arguments import Parser
from forebay.config.engine_config import ServerConfig


def run(words: Sequence[str]) -> int:
    """Run the router until a signal; return the exit code."""
    summary = "Send each request's prompt to a prefill server and have a decode server answer it."
    parser = Parser("route", summary, "--prefill URL... --decode URL... [options]")
    for role in ("prefill", "decode"):
        help = f"a {role} server, such as http://10.0.0.1:30000; may be given several times"
        parser.option(f"--{role}", action="append", metavar="URL", help=help)
    parser.server_flags()
    parsed = parser.parse(words)
    if not (parsed.own.prefill and parsed.own.decode):
        raise ConfigError("give at least one --prefill URL and one --decode URL (or forebay serve --pd local)")
    config = parsed.resolve_server()
    setup_logging(config.log_level, process="router")
    key = config.api_keys[0] if config.api_keys else ""
    prefill, decode = ([Origin(url, key) for url in urls] for urls in (parsed.own.prefill, parsed.own.decode))
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_route(config, prefill, decode))
    return 0


async def _route(config: ServerConfig, prefill: list[Origin], decode: list[Origin]) -> None:
    from forebay.route.app import create_app
    from forebay.route.members import Members
    from forebay.route.router import Router
    from forebay.server.http.listen import fit_file_limit, listen

    config = fit_file_limit(config)
    router = Router(config, Members(prefill, decode, config.cluster_key))
    router.spawn(router.members.watch())
    app = create_app(router)
    await listen(config, app, router.lifecycle, router, on_ready=lambda url: print(f"routing at {url}", flush=True))
