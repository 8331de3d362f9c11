"""The least of an OpenAI server, for peers that have none: greedy /v1/completions over token ids or a text.

An engine runs in a thread of its own and hands over what it generated once per step; each token becomes one event, as
the servers it is compared with do it. It needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Step = Sequence[tuple["Request", Sequence[int]]]


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` is what the engine generated and nobody has sent yet."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class Engine(Protocol):
    """`submit` must return at once; afterwards the engine gives the request's tokens to `deliver`, `max_tokens` of them
    or fewer and then `END`."""

    def submit(self, request: Request) -> None: ...

    def text(self, token: int) -> str: ...

    def ids(self, text: str) -> list[int]: ...


END = -1


class Deliver:
    """From the engine's thread to the server's loop: one call for all that a step generated."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __call__(self, step: Step) -> None:
        self._loop.call_soon_threadsafe(self._put, step)

    @staticmethod
    def _put(step: Step) -> None:
        for request, tokens in step:
            for token in tokens:
                request.tokens.put_nowait(token)


def serve(make_engine: Callable[[Deliver], Engine], *, port: int, model: str) -> None:
    """Answer on 127.0.0.1 until the process is ended. The port opens once the engine is there."""

    async def main() -> None:
        engine = make_engine(Deliver())
        server = await asyncio.start_server(
            lambda r, w: connection(r, w, engine, model), "127.0.0.1", port, limit=1 << 20
        )
        await server.serve_forever()

    asyncio.run(main())


def in_thread(run: Callable[[], None]) -> None:
    """An engine that fails takes the process with it: whoever measures must not wait for it."""

    def guarded() -> None:
        try:
            run()
        finally:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=guarded, daemon=True).start()


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engine: Engine, model: str) -> None:
    """One kept-alive connection, one request at a time."""
    try:
        while True:
            method, path, body = await read_request(reader)
            if method == "POST" and path == "/v1/completions":
                await (stream if body.get("stream") else answer)(writer, engine, body)
            else:
                write_json(writer, {"object": "list", "data": [{"id": model, "object": "model"}]})
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    return method, path, json.loads(body) if body else {}


def submitted(engine: Engine, body: dict[str, Any]) -> Request:
    prompt = body["prompt"]
    ids = engine.ids(prompt) if isinstance(prompt, str) else prompt
    request = Request(ids, body["max_tokens"], bool(body.get("ignore_eos")))
    engine.submit(request)
    return request


async def answer(writer: asyncio.StreamWriter, engine: Engine, body: dict[str, Any]) -> None:
    request, tokens = submitted(engine, body), list[int]()
    while len(tokens) < request.max_tokens and (token := await request.tokens.get()) != END:
        tokens.append(token)
    text, reason = "".join(map(engine.text, tokens)), "length" if len(tokens) == request.max_tokens else "stop"
    choice = {"index": 0, "text": text, "finish_reason": reason}
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(tokens)}
    write_json(writer, {"object": "text_completion", "choices": [choice], "usage": usage})


async def stream(writer: asyncio.StreamWriter, engine: Engine, body: dict[str, Any]) -> None:
    request = submitted(engine, body)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    count = 0
    while count < request.max_tokens and (token := await request.tokens.get()) != END:
        count += 1
        reason = "length" if count == request.max_tokens else None
        choice = {"index": 0, "text": engine.text(token), "finish_reason": reason}
        write_event(writer, {"object": "text_completion", "choices": [choice]})
    if count < request.max_tokens:
        choice = {"index": 0, "text": "", "finish_reason": "stop"}
        write_event(writer, {"object": "text_completion", "choices": [choice]})
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": count}
    write_event(writer, {"object": "text_completion", "choices": [], "usage": usage})
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def write_json(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
