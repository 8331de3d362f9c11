"""The server of one engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from forebay.config.config import ServerConfig
from forebay.engine.client.async_engine import AsyncEngine
from forebay.http.listen import fit_file_limit, listen
from forebay.server.app import create_app, create_context
from forebay.server.served_model import ServedModel
from forebay.text.tokenizer import Tokenizer


async def serve(
    config: ServerConfig,
    model: ServedModel,
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    *,
    sock: socket.socket | None = None,
    inherited: bool = False,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """As `listen`. Owns the engine, whose model may still be loading; requests get 503 until it is there."""
    config = fit_file_limit(config)
    context = create_context(config, model, engine, tokenizer)
    engine.link.on_sleep, engine.link.on_wake = tokenizer.release_memory, tokenizer.wake
    try:
        app, lifecycle = create_app(context), context.lifecycle
        recordings = engine.link.recordings
        await listen(
            config,
            app,
            lifecycle,
            engine.link,
            sock=sock,
            inherited=inherited,
            on_ready=on_ready,
            stop=stop,
            on_user_signal=(lambda: recordings.begin("SIGUSR1", last=True)) if recordings.enabled else None,
        )
    finally:
        if context.tracer is not None:
            await asyncio.to_thread(context.tracer.close)
        context.json_workers.close()
        context.workers.close()
        context.grammars.close()
        if context.images is not None:
            context.images.close()
