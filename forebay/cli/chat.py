"""`forebay chat`: a conversation in the terminal, with a running server or with an engine of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from forebay.base.errors import ForebayError, Unavailable
from forebay.base.http_client import Origin, get_json, stream_json
from forebay.cli.arguments import Parsed, Parser, note
from forebay.cli.generate import add_sampling, sampling
from forebay.cli.local import LocalModel, local_model
from forebay.requests.sampling_params import RANDOM_SEED

Message = dict[str, str]
Reply = Callable[[list[Message]], AsyncIterator[str]]

DEFAULT_URL: Final = "http://127.0.0.1:30000"
HELP: Final = "/reset starts over, /exit or Ctrl-D ends"


def run(words: Sequence[str]) -> int:
    parser = Parser(
        "chat",
        f"Talk to the server at --url ({DEFAULT_URL} if one answers there), else to an engine that is\n"
        "started for it. A MODEL always starts an engine.",
        "[MODEL] [options]",
    )
    parser.option("--url", metavar="URL", help="a running server")
    parser.option("--system", metavar="TEXT", help="the system message")
    add_sampling(parser, temperature=0.6, max_tokens=None)
    parser.engine_flags(server=False, model_is_positional=True)
    parser.option("--api-key", metavar="KEY", dest="key", help="for the server; better in FOREBAY_API_KEY")
    parsed = parser.parse(words)
    asyncio.run(_chat(parsed))
    return 0


async def _chat(parsed: Parsed) -> None:
    own = parsed.own
    origin = Origin(own.url or DEFAULT_URL, own.key or os.environ.get("FOREBAY_API_KEY", ""))
    if own.url or (not parsed.flags and await _answers(origin)):
        model = (await get_json(origin, "/v1/models"))["data"][0]["id"]
        await _talk(f"{model} at {origin}", own.system, _remote(origin, model, own))
        return
    config = parsed.resolve(max_running_requests=1, log_level="warning")
    note("loading the model")
    async with local_model(config) as local:
        await _talk(config.engine.served_model_name, own.system, _local(local, own))


async def _answers(origin: Origin) -> bool:
    try:
        await get_json(origin, "/v1/models")
    except ForebayError:
        return False
    return True


def _remote(origin: Origin, model: str, own: argparse.Namespace) -> Reply:
    options: dict[str, Any] = {"temperature": own.temperature, "top_p": own.top_p}
    options |= {} if own.max_tokens is None else {"max_completion_tokens": own.max_tokens}
    options |= {} if own.seed == RANDOM_SEED else {"seed": own.seed}
    options |= {"top_k": own.top_k} if own.top_k else {}
    options |= {"min_p": own.min_p} if own.min_p else {}

    async def reply(messages: list[Message]) -> AsyncIterator[str]:
        payload = {"model": model, "messages": messages, "stream": True, **options}
        async for event in stream_json(origin, "/v1/chat/completions", payload):
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""

    return reply


def _local(model: LocalModel, own: argparse.Namespace) -> Reply:
    async def reply(messages: list[Message]) -> AsyncIterator[str]:
        ids = model.tokenizer.encode_chat(messages, max_tokens=model.context_length)
        async for piece in model.stream(ids, sampling(own, model.room(len(ids), own.max_tokens))):
            yield piece

    return reply


async def _talk(name: str, system: str | None, reply: Reply) -> None:
    print(f"{name}. {HELP}")
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := await _ask()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(first)
        elif line.startswith("/"):
            print(HELP)
        elif line.strip():
            await _turn(messages, line, reply)


async def _turn(messages: list[Message], line: str, reply: Reply) -> None:
    """One question and its answer. What fails leaves the conversation as it was before."""
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []
    started = time.monotonic()
    try:
        async for piece in reply(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except Unavailable:
        raise
    except ForebayError as error:
        messages.pop()
        print()
        note(error.message)
        return
    messages.append({"role": "assistant", "content": "".join(pieces)})
    print(f"\n[{time.monotonic() - started:.1f} s]" if sys.stdout.isatty() else "")


async def _ask() -> str | None:
    """A line of input, None at its end. In a thread, so that the engine's channel is served while a person types."""
    try:
        return await asyncio.to_thread(input, "> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
