"""The server of `forebay serve`, around an engine process that has been started already."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from typing import TYPE_CHECKING

import uvloop

from forebay.base.errors import ForebayError
from forebay.base.heap import give_back_freed_memory
from forebay.base.log import setup_logging
from forebay.cli.arguments import Parsed
from forebay.config.config import Config
from forebay.config.engine_config import EngineConfig, EvictionPolicy, SchedulePolicy
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.lifecycle.launch import EngineProcess, configure
from forebay.engine.lifecycle.spawn import Spawned, spawn

if TYPE_CHECKING:  # both take long to import, and the engine starts meanwhile
    from forebay.server.served_model import ServedModel
    from forebay.text.tokenizer import Tokenizer


def serve_from(parsed: Parsed, spawned: Spawned | None, sock: socket.socket | None = None) -> int:
    """Serve until a signal ends it. Owns `spawned` once it is known what to serve; without one it starts an engine of
    its own. `sock` listens already, in the place of --host and --port. The collector is off until the server is up, or
    is not to come up."""
    gc.disable()
    try:
        started = time.monotonic()
        config = parsed.resolve()
        if not config.server.pd:
            return _serve_one(config, spawned, started, sock)
    finally:
        gc.enable()
    from forebay.cli.local_fleet import serve_fleet

    if spawned is not None:
        spawned.discard()
    return serve_fleet(parsed, config)


def _serve_one(config: Config, spawned: Spawned | None, started: float, sock: socket.socket | None) -> int:
    name = config.engine.disaggregation.named("server")
    setup_logging(config.server.log_level, process=name, format=config.server.log_format)
    process = configure(spawned or spawn(), config.engine)
    try:
        # Ctrl-C waits until the server takes it: in between it would tear the loop from tasks that have just begun.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, process, started, sock))
    finally:
        process.stop(0.0)  # it has ended, unless we failed before it could serve anybody
    return 0


async def _serve(config: Config, process: EngineProcess, started: float, sock: socket.socket | None) -> None:
    """Bind before the engine is ready, so that a port in use is reported at once."""
    from forebay.http.listen import bind
    from forebay.server.serve import serve

    inherited, sock = sock is not None, sock or bind(config.server)
    engine, tokenizer, model = await connect(config, process)
    startup_tasks: list[asyncio.Task[None]] = []

    def on_ready(url: str) -> None:
        # What is alive now stays: the collector need not walk it in the middle of a stream.
        gc.freeze()
        gc.enable()
        give_back_freed_memory()
        startup_tasks.append(asyncio.create_task(_print_when_ready(config, engine, model, url, started)))

    try:
        await serve(config.server, model, engine, tokenizer, sock=sock, inherited=inherited, on_ready=on_ready)
    finally:
        for task in startup_tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ForebayError):
                await task


async def connect(config: Config, process: EngineProcess) -> tuple[AsyncEngine, Tokenizer, ServedModel]:
    """Connect to the engine, which may still load, and read the checkpoint's files for the server. Raises ModelError,
    with the engine ended."""
    from forebay.text.tokenizer import Tokenizer

    engine = await AsyncEngine.connect(process)
    try:
        tokenizer = Tokenizer.from_path(config.engine.model_path, config.server.chat_template)
        await asyncio.to_thread(tokenizer.check_chat_template)
        model = await asyncio.to_thread(_served, config, tokenizer)
        engine.add_end_tokens(model.end_tokens)
        return engine, tokenizer, model
    except ForebayError:
        await engine.close(drain_s=0.0)
        raise


def _served(config: Config, tokenizer: Tokenizer) -> ServedModel:
    """Read the checkpoint's files for the server. Raises ModelError."""
    from forebay.engine.client.embedding import Texts
    from forebay.server.images.tiling import tiling_at
    from forebay.server.served_model import ServedModel
    from forebay.text.answers.probes import find_formats
    from forebay.text.end_tokens import end_tokens

    calls, thinking = config.server.tool_call_parser, config.server.reasoning_parser
    return ServedModel(
        name=config.engine.served_model_name,
        path=config.engine.model_path,
        created=int(time.time()),
        settings=config.settings,
        uses_priority=_uses_priority(config.engine),
        wakes_on_request=config.engine.wake_on_request,
        stall_timeout_s=config.engine.scheduling.stall_timeout_s,
        mode=config.engine.disaggregation.mode,
        answers=find_formats(tokenizer, calls=calls, thinking=thinking),
        end_tokens=end_tokens(tokenizer),
        texts=Texts.of(config.engine.model_path, config.server.pooling),
        tiling=tiling_at(config.engine.model_path, config.engine.pictures.mmproj),
    )


def _uses_priority(config: EngineConfig) -> bool:
    return (
        config.scheduling.schedule_policy is SchedulePolicy.PRIORITY
        or config.scheduling.radix_eviction_policy is EvictionPolicy.PRIORITY
    )


async def _print_when_ready(config: Config, engine: AsyncEngine, model: ServedModel, url: str, started: float) -> None:
    """Print the start-up table and the ready line once the model is loaded; `serve` reports its failure."""
    from forebay.cli.startup_table import print_startup

    ready = await engine.ready()
    found = model.answers
    formats = {"tool_calls": found.formats.calls, "reasoning": found.formats.thinking}
    rows = [(name.replace("_", " "), form or "none", found.evidence.get(name, "")) for name, form in formats.items()]
    print_startup(config, ready, url, time.monotonic() - started, rows)
