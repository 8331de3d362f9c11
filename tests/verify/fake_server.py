"""A server of the OpenAI API whose answers are words made of the prompt's digest, with faults that a test chooses."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

WORDS = ("tide", "mill", "oak", "rain", "iron", "salt", "wool", "lamp")


@dataclass
class FakeServer:
    """`gather` is the number of requests that are answered together, `batch_from` the number from which answers of a
    batch differ, `drift_from` that from which their log-probabilities do. `status` and `body` replace every answer of a
    POST, from the `good`-th on; `garbage` is an event of each stream."""

    owner: str = "vllm"
    models: tuple[str, ...] = ("fake",)
    batch_from: int = 0
    drift_from: int = 0
    gather: int = 1
    unsteady: frozenset[str] = frozenset()  # kinds of requests whose repetition differs: "seed", "greedy"
    wrong_with_a_salt: bool = False  # that a prompt did not have first
    wrong_from_cache: bool = False
    wrong_in_stream: bool = False
    wrong_without_logprobs: bool = False
    wrong_after_abort: bool = False
    wrong_beside_long: bool = False
    awaits_long: bool = False
    gives_logprobs: bool = True
    reports_cached: bool = True
    refuses: str = ""  # a field of the body
    fails_on: str = ""  # a field of the body, with status 500
    refuses_logprobs: tuple[str, ...] = ()  # of a body with all of these fields
    status: int = 200
    body: bytes = b""
    good: int = 0
    garbage: bytes = b""
    members: list[dict[str, Any]] | None = None  # of a router
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _asked: Counter[str] = field(default_factory=Counter)
    _cached: set[tuple[str, str]] = field(default_factory=set)
    _salts: dict[str, str | None] = field(default_factory=dict)
    _aborted: set[str] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _waiting: list[asyncio.Future[int]] = field(default_factory=list)
    _long: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self._long.set()  # ends an answer that waits for a prompt
            if self._serving:
                await asyncio.wait(self._serving)  # each ends when its client has left

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /server_info"):
                info = {} if self.members is None else {"members": self.members}
                await _send(writer, 404 if self.members is None else 200, json.dumps(info).encode())
                return
            if head.startswith("GET"):
                entries = [{"id": name, "owned_by": self.owner} for name in self.models]
                await _send(writer, 200, json.dumps({"object": "list", "data": entries}).encode())
                return
            length = next(int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:"))
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            await self._batched(reader, writer, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _batched(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        """Answer once `gather` requests are here, or never, if the client leaves before."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if len(self._waiting) >= self.gather:
            for other in self._waiting:
                other.set_result(len(self._waiting))
            self._waiting.clear()
        left = asyncio.create_task(reader.read(1))
        await asyncio.wait({place, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if place.done():
            await self._answer(writer, {**body, "batch": place.result()})
        else:
            self._waiting.remove(place)

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if (self.status != 200 or self.body) and len(self.bodies) > self.good:
            await _send(writer, self.status, self.body or b'{"error": {"message": "no"}}')
        elif self.refuses and self.refuses in body:
            await _send(writer, 400, json.dumps({"error": {"message": f"{self.refuses} is unknown"}}).encode())
        elif self.refuses_logprobs and {*self.refuses_logprobs, "logprobs"} <= body.keys():
            await _send(writer, 400, b'{"error": {"message": "no logprobs"}}')
        elif self.fails_on and self.fails_on in body:
            await _send(writer, 500, b'{"error": {"message": "stack trace"}}')
        elif body.get("stream"):
            await self._stream(writer, body)
        else:
            words, usage = self._words(body), self._usage(body)
            message = {"content": " ".join(words)}
            choice = {"message": message, "finish_reason": "length", **self._logprobs(body, words)}
            await _send(writer, 200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = _prompt(body)
        cached = len(prompt) // 8 if self._hits(body) else 0
        self._cached.add((body.get("cache_salt", ""), prompt[:40]))
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.reports_cached else {}
        return {"prompt_tokens": len(prompt) // 4, **details}

    def _hits(self, body: dict[str, Any]) -> bool:
        return (body.get("cache_salt", ""), _prompt(body)[:40]) in self._cached

    def _words(self, body: dict[str, Any]) -> list[str]:
        prompt = _prompt(body)
        self._asked[prompt] += 1
        if len(prompt) > 5000 and body["max_tokens"] == 1:
            self._long.set()
        digest = hashlib.sha256(f"{prompt} {body.get('seed')}".encode()).digest()
        words = [WORDS[byte % len(WORDS)] for byte in digest[: min(6, body["max_tokens"])]]
        if self._is_wrong(body):
            words[-1] = "wrong"
        return words

    def _is_wrong(self, body: dict[str, Any]) -> bool:
        prompt, kind, salt = _prompt(body), "seed" if "seed" in body else "greedy", body.get("cache_salt")
        return (
            (0 < self.batch_from <= body["batch"])
            or (kind in self.unsteady and self._asked[prompt] > 1)
            or (self.wrong_with_a_salt and self._salts.setdefault(prompt, salt) != salt)
            or (self.wrong_from_cache and self._hits(body))
            or (self.wrong_in_stream and bool(body.get("stream")))
            or (self.wrong_without_logprobs and not body.get("logprobs") and body["max_tokens"] > 1)
            or (self.wrong_after_abort and prompt in self._aborted)
        )

    def _logprobs(self, body: dict[str, Any], words: list[str]) -> dict[str, Any]:
        if not (self.gives_logprobs and body.get("logprobs")):
            return {}
        tops = [{"token": "wrong", "logprob": -1.5}, {"token": "tide", "logprob": -2.0}]
        logprob = -0.75 if 0 < self.drift_from <= body["batch"] else -0.5
        return {"logprobs": {"content": [{"token": word, "logprob": logprob, "top_logprobs": tops} for word in words]}}

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        """Send a word an event; with `awaits_long` wait for a long prompt before the last one."""
        words, usage = self._words(body), self._usage(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n: hello\r\n\r\n")
        writer.write(self.garbage)
        for place, word in enumerate(words):
            if self.awaits_long and place == len(words) - 1:
                await self._long.wait()
                word = "wrong" if self.wrong_beside_long else word
            text = word if place == 0 else f" {word}"
            choice = {"delta": {"content": text}, "finish_reason": None, **self._logprobs(body, [word])}
            writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n")
            await writer.drain()
            if place == 2 and self.wrong_after_abort:
                self._aborted.add(_prompt(body))
        end = {"choices": [{"delta": {}, "finish_reason": "length"}]}
        for event in (end, {"choices": [], "usage": usage}):
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


def _prompt(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    await writer.drain()
