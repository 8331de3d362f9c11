"""`forebay pd check`: whether what a prefill server keeps of prompts comes to a decode server, and how fast."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ConfigError, EngineError, ForebayError, Unavailable
from forebay.base.http_client import Connection, Origin, error_text, get_json
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser, whole
from forebay.config.engine_config import DisaggregationMode
from forebay.config.keys import read_text

ROUNDS: Final = 3  # the first opens the session
WAIT_S: Final = 60
MAX_KEY_BYTES: Final = 1 << 10
POLL_S: Final = 0.5
_ROLES: Final = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)

Info = dict[str, Any]


def run(words: Sequence[str]) -> int:
    """Check a transfer between two servers; return 1 if the layouts or the data differ."""
    summary = (
        "Send a pattern through all that layers keep, from a prefill to a decode server: prints the layout that\n"
        "was compared and how fast it came. Exit code 1 where they do not fit, or something else arrived."
    )
    parser = Parser("pd", summary, "check URL URL [options]")
    parser.option("action", nargs="?", default="", help="check")
    parser.option("urls", nargs="*", help="the two servers, in any order, such as http://10.0.0.1:30000")
    parser.option(
        "--bootstrap-host", default="", metavar="HOST", help="the prefill server as decode reaches it, if not as here"
    )
    parser.option("--admin-api-key-file", default="", metavar="FILE", help="an admin key of both servers")
    parser.option(
        "--wait", type=whole(0, 3600), default=WAIT_S, metavar="S", help="seconds for servers that still start"
    )
    own = parser.parse(words).own
    if own.action != "check" or len(own.urls) != 2:
        raise ConfigError("write forebay pd check URL URL: a prefill server and a decode server")
    key = ""
    if own.admin_api_key_file:
        key = read_text(Path(own.admin_api_key_file), "--admin-api-key-file", MAX_KEY_BYTES).strip()
    return asyncio.run(_check([Origin(url, key) for url in own.urls], own.bootstrap_host, own.wait))


async def _check(origins: Sequence[Origin], host: str, wait_s: float) -> int:
    infos = [await _info(origin, time.monotonic() + wait_s) for origin in origins]
    modes = [info["disaggregation_mode"] for info in infos]
    if sorted(modes) != sorted(_ROLES):
        found = ", ".join(f"{origin} is {mode}" for origin, mode in zip(origins, modes, strict=True))
        raise ConfigError(f"a check needs a prefill and a decode server, and by --disaggregation-mode {found}")
    prefill, decode = (origins[modes.index(role)] for role in _ROLES)
    prefill_info = infos[modes.index(DisaggregationMode.PREFILL)]
    where = {"bootstrap_host": host or prefill.host, "bootstrap_port": prefill_info["disaggregation_bootstrap_port"]}
    rounds = [await _post(decode, where) for _ in range(ROUNDS)]
    print(f"prefill {prefill}, decode {decode}: the same layout on both sides")
    for line in layout_lines(rounds[0]["layout"], prefill_info["engine"]["page_size"]):
        print(f"  {line}")
    return _print_transfers(rounds)


def _print_transfers(rounds: Sequence[Info]) -> int:
    """Print the highest speed of the rounds, and each column that arrived wrong. Returns 1 if one did."""
    best = max(rounds, key=lambda found: float(found["bytes_per_s"]))
    speed = f"{best['bytes_per_s'] / 1e9:.2f} GB/s" if best["bytes_per_s"] else "too little to tell how fast"
    print(f"{human_bytes(best['num_bytes'])} by {best['transport']}, {ROUNDS} times: {speed}")
    wrong = sorted({line for found in rounds for line in found["wrong"]})
    for line in wrong:
        print(f"WRONG {line}")
    print("something else than was sent has arrived" if wrong else "all arrived as it was sent")
    return 1 if wrong else 0


def layout_lines(layout: Info, prefill_page_size: int) -> list[str]:
    """Describe the layout that both sides share; columns of one shape are counted."""
    columns = Counter((line.split()[0], line.partition(": ")[2]) for line in layout["columns"])
    shared = {name: value for name, value in layout.items() if name not in ("columns", "page_size") and value != ""}
    return [
        ", ".join(f"{name} {value}" for name, value in shared.items()),
        f"page_size {prefill_page_size} on prefill, {layout['page_size']} on decode",
        *(f"{kind}: {count} columns of {shape}" for (kind, shape), count in columns.items()),
    ]


async def _info(origin: Origin, until: float) -> Info:
    """Return the server's description of itself, once it takes requests."""
    while True:
        try:
            await get_json(origin, "/ready")
            return await get_json(origin, "/server_info")
        except ForebayError as error:
            if time.monotonic() > until:
                raise Unavailable(f"{origin} is not ready: {error.message}") from None
        await asyncio.sleep(POLL_S)


async def _post(origin: Origin, where: Info) -> Info:
    connection = await Connection.connect(origin)
    try:
        body = await connection.request("POST", "/check_transfers", where)
    finally:
        connection.close()
    if connection.status != 200:
        raise EngineError(error_text(connection.status, body))
    found: Info = json.loads(body)
    return found
