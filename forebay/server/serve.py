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
    close_events = _publish_events(config, engine)
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
        await asyncio.to_thread(close_events)
        context.json_workers.close()
        context.workers.close()
        context.grammars.close()
        if context.images is not None:
            context.images.close()


def _publish_events(config: ServerConfig, engine: AsyncEngine) -> Callable[[], None]:
    """Publish the events of the engine's prefix cache, if the settings have an address for them, until the returned
    function is called. Raises ConfigError for an address that cannot be bound."""
    if not config.kv_events:
        return lambda: None
    from forebay.server.kv_events import KvEventPublisher

    events = KvEventPublisher(config.kv_events, config.kv_events_replay)
    engine.link.on_cache_events = events.put
    return events.close
