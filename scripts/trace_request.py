"""The path of one streamed chat through the server process: every function that it goes through, by thread.

    python scripts/trace_request.py [--model PATH] [--files]

A client connects to the real server, which has a scripted engine at the other end of its channel, and asks for three
tokens: from the connection to the stream's last byte. Another client has asked before, so nothing has to be started.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import httpx

from forebay.engine.channel import ChannelClosed
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.frames import AddRequest, Updates
from forebay.requests.updates import CacheReport, FinishReason, Update
from forebay.text.tokenizer import Tokenizer
from scripts.trace_step import Trace
from tests.engine.engine_fakes import READY, ScriptedEngine
from tests.server.conftest import start
from tests.text.tiny_tokenizer import tiny_tokenizer

TOKENS: Final = (400, 500, 600)
CHAT: Final = {"messages": [{"role": "user", "content": "hello world"}], "stream": True, "max_tokens": len(TOKENS)}


class TracedThreads:
    """A `Trace` of each thread that is started under `profiled`, but for those of the scripted engine."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}
        self._records = False

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile threads that are started inside."""
        threading.setprofile(self._see)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._records = True
        try:
            yield
        finally:
            self._records = False

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set().union(*(trace.functions for trace in self.traces.values()))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    @property
    def calls(self) -> Counter[str]:
        """Return how often each function was entered, by its qualified name."""
        counts: Counter[str] = Counter()
        for trace in self.traces.values():
            for call in trace.calls:
                counts[call.function] += call.times
        return counts

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        name = threading.current_thread().name
        if self._records and name != ENGINE:
            self.traces.setdefault(name, Trace()).see(frame, event, arg)


ENGINE: Final = "scripted engine"


class AnsweringEngine(ScriptedEngine):
    """A scripted engine that answers each request with `TOKENS`, an update each."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._run, name=ENGINE, daemon=True)
        self._thread.start()

    async def connect(self) -> AsyncEngine:
        """Return the client of this engine, once that is ready."""
        engine = await AsyncEngine.connect(self)  # type: ignore[arg-type]
        await engine.ready()
        return engine

    def _run(self) -> None:
        self.say(READY)
        try:
            while True:
                for frame in self.channel.receive(None):
                    if isinstance(frame, AddRequest):
                        self._answer(frame.request_id)
        except ChannelClosed:
            self.die()

    def _answer(self, request_id: int) -> None:
        for i, token in enumerate(TOKENS):
            update = Update(request_id=request_id, token_ids=[token])
            if i == 0:
                update.cache = CacheReport()
            if i == len(TOKENS) - 1:
                update.finish = FinishReason.LENGTH
            self.say(Updates.pack([update]))


def trace_chat(tokenizer: Tokenizer, body: dict[str, Any] = CHAT, path: str = "/v1/chat/completions") -> TracedThreads:
    """Return the path of a request to the server of `tokenizer`. Raises AssertionError unless it is answered."""
    traced = TracedThreads()
    with traced.profiled():
        server = start(tokenizer, lambda: AnsweringEngine().connect())
        try:
            with server.client() as first, server.client() as client:
                _ask(first, path, body)
                with traced.recording():
                    _ask(client, path, body)
                    server.call(lambda: None)  # what the answer leaves to do has been done
        finally:
            server.close()
    return traced


def _ask(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint whose tokenizer and chat template to use")
    parser.add_argument("--files", action="store_true", help="print the functions by file")
    args = parser.parse_args()
    traced = trace_chat(Tokenizer.from_path(args.model) if args.model else tiny_tokenizer())
    if args.files:
        for file in sorted(traced.files):
            print(file, *sorted(name for of, name in traced.functions if of == file), sep="\n    ")
    else:
        for name, trace in traced.traces.items():
            print(f"{name}:", *trace.calls, sep="\n")
    print(f"\n{len(traced.functions)} functions in {len(traced.files)} files, {traced.calls.total()} calls")


if __name__ == "__main__":
    main()
