"""`forebay verify --receipt FILE`: whether a server, or an engine that is started for it, gives an answer again that a
client has stored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from forebay.base import child
from forebay.base.errors import ConfigError, EngineError, ForebayError
from forebay.base.http_client import Origin, get_json
from forebay.cli.arguments import Parser
from forebay.cli.verify_url import key_in
from forebay.config.flag import Value
from forebay.verify.receipts import Stored, repeat
from forebay.verify.remote.server import Server
from forebay.verify.verdict import EXIT_DIFFERENT

_MEMBER: Final = ("-P", "-m", "forebay.cli.member")
_STOP_S: Final = 10.0
_POLL_S: Final = 0.1


def run(words: Sequence[str]) -> int:
    """Print the verdict. Return 0 if the answer is the same, 1 if it or what computes it differs."""
    summary = (
        "Repeat an answer that a client has stored, alone and without the prefix cache, and compare its tokens. FILE "
        'is JSON with the "request" as it was sent (with "receipt": true) and the "answer" as it came, or its last '
        "event. First what the server computes with is compared with the receipt: if it differs, nothing runs. Without "
        "--url a server of MODEL is started for it, with the settings given here."
    )
    examples = [
        "--receipt answer.json --url http://localhost:30000",
        "--receipt answer.json ./my-model --dtype float32",
    ]
    parser = Parser("verify", summary, "--receipt FILE [--url URL | MODEL] [options]", examples)
    parser.option("--receipt", metavar="FILE", help="the request and its answer")
    parser.option("--url", metavar="URL", help="the server that repeats it")
    parser.option("--api-key-file", metavar="FILE", help="its first line is the key of that server")
    parser.engine_flags(server=False, model_is_positional=True)
    parsed = parser.parse(words)
    own, stored = parsed.own, Stored.read(Path(parsed.own.receipt))
    if own.url:
        if parsed.flags:
            raise ConfigError("--receipt repeats the answer with the server at --url, or with MODEL: give one of both")
        verdict = asyncio.run(_repeated(stored, own.url, stored.model, own.api_key_file))
    else:
        values = parsed.values
        with served(values if "lora_modules" in values else {"served_model_name": stored.model, **values}) as url:
            verdict = asyncio.run(_repeated(stored, url, None, None))
    Console(highlight=False, markup=False, soft_wrap=True).print("\n".join(verdict or ("same",)))
    return EXIT_DIFFERENT if verdict else 0


@contextlib.contextmanager
def served(values: Mapping[str, Value | None]) -> Iterator[str]:
    """Start a server with these settings on a free port of this machine; yield its address. It ends with the block."""
    from forebay.cli.local_fleet import word

    words = [word(name, value) for name, value in {"log_level": "error", **values}.items() if value is not None]
    lease, held = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        process = child.start(
            [*_MEMBER, str(sock.fileno()), str(lease), *words], descriptors=[sock.fileno(), lease], own_session=True
        )
        port = sock.getsockname()[1]
    os.close(lease)
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_ready(url, process))
        yield url
    finally:
        os.close(held)
        child.end([process], _STOP_S)


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server has loaded its model. Raises EngineError if it ends before."""
    origin = Origin(url)
    while process.poll() is None:
        with contextlib.suppress(ForebayError):
            await get_json(origin, "/ready")
            return
        await asyncio.sleep(_POLL_S)
    raise EngineError(f"the server of the model ended before it answered, exit code {process.returncode}")


async def _repeated(stored: Stored, url: str, model: str | None, key_file: str | None) -> list[str]:
    server = await Server.find(url, model, key_in(key_file))
    try:
        return await repeat(stored, server)
    finally:
        await server.aclose()
