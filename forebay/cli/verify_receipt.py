"""`forebay verify --receipt FILE --url URL`: whether a server gives an answer again that a client has stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parser
from forebay.verify.receipts import Stored, repeat
from forebay.verify.remote.server import Server
from forebay.verify.verdict import EXIT_DIFFERENT


def run(words: Sequence[str]) -> int:
    """Print the verdict. Return 0 if the answer is the same, 1 if it or what computes it differs."""
    summary = (
        "Repeat an answer that a client has stored, alone and without the prefix cache, and compare its tokens. FILE "
        'is JSON with the "request" as it was sent (with "receipt": true) and the "answer" as it came, or its last '
        "event. First what the server computes with is compared with the receipt: if it differs, nothing runs."
    )
    parser = Parser(
        "verify", summary, "--receipt FILE --url URL", ["--receipt answer.json --url http://localhost:30000"]
    )
    parser.option("--receipt", metavar="FILE", help="the request and its answer")
    parser.option("--url", metavar="URL", help="the server that repeats it")
    parser.option("--api-key-file", metavar="FILE", help="its first line is the server's key")
    own = parser.parse(words).own
    if not own.url:
        raise ConfigError("--receipt needs a server that repeats the answer: give its --url")
    stored = Stored.read(Path(own.receipt))
    verdict = asyncio.run(_repeated(stored, own.url, own.api_key_file))
    Console(highlight=False, markup=False, soft_wrap=True).print("\n".join(verdict or ("same",)))
    return EXIT_DIFFERENT if verdict else 0


async def _repeated(stored: Stored, url: str, key_file: str | None) -> list[str]:
    key = Path(key_file).read_text().partition("\n")[0].strip() if key_file else ""
    server = await Server.find(url, stored.model, key)
    try:
        return await repeat(stored, server)
    finally:
        await server.aclose()
