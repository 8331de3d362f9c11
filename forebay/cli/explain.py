"""`forebay explain ID`: what became of a request, and what would have made it faster."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from forebay.base.errors import ConfigError
from forebay.base.http_client import Origin, get_json
from forebay.cli.arguments import Parser
from forebay.cli.chat import DEFAULT_URL


def run(words: Sequence[str]) -> int:
    """Ask a server or a router about a request, and print the answer."""
    summary = (
        "Print what became of a request: its waiting, its first token, its end, what of its prompt was cached, and "
        "what would have made it faster. A server knows the last 1,000 requests of each key."
    )
    parser = Parser("explain", summary, "ID [options]", ["chatcmpl-3f2a", "3f2a --url http://router:9000"])
    parser.option("id", nargs="?", help="the answer's id, or its header x-request-id")
    parser.option("--url", metavar="URL", help="the server or router", default_text=DEFAULT_URL)
    parser.option("--key", metavar="KEY", help="API key", default_text="FOREBAY_API_KEY")
    parser.option("--json", action="store_true", help="for programs")
    own = parser.parse(words).own
    if not own.id:
        raise ConfigError("which request? Give the id of its answer, or of its header x-request-id")
    origin = Origin(own.url or DEFAULT_URL, own.key or os.environ.get("FOREBAY_API_KEY", ""))
    said = asyncio.run(get_json(origin, f"/debug/explain/{quote(own.id, safe='')}"))
    print(json.dumps(said, indent=2) if own.json else "\n".join(lines_of(said)))
    return 0


def lines_of(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an explanation for people."""
    yield f"{said['id']} on {said['server']}: {said['route']}, {said['model']}"
    first = said["first_token_s"]
    yield (
        f"waited {said['waited_s']:.3f} s for its {said['waited_for']}; "
        f"prompt computed in {said['chunks']} chunk{'s' * (said['chunks'] != 1)}; "
        f"{'no token' if first is None else f'first token after {first:.3f} s'}"
    )
    error = f" ({said['error']})" if said["error"] else ""
    yield f"{said['output_tokens']} tokens after {said['total_s']:.3f} s; end: {said['finish']}{error}"
    if said["retractions"]:
        yield f"retracted {said['retractions']} times, {said['recomputed_tokens']} tokens computed again"
    kinds = ", ".join(f"{kind} {length}" for kind, length in said["matched_tokens"].items())
    yield (
        f"{said['cached_tokens']} of {said['prompt_tokens']} prompt tokens cached ({kinds}), {said['miss_reason']}; "
        f"nearest cached prefix {said['nearest_prefix']} tokens"
    )
    if said["difference"]:
        yield f"left that of its session: {said['difference']}"
    yield from (f"would help: {text}" for text in said["would_help"])
