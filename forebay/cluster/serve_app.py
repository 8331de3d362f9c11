"""Forebay as an application of Ray Serve, for clusters that have Serve already: each replica is one server.

Serve adds a proxy to each request: use it with HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1), or use `forebay cluster`. The
direct ingress of Serve uses ports from 30000 on, Forebay's default: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT and
RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT move it.
"""

from __future__ import annotations

import http
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.base.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class Ingress:
    """One replica. Serve calls `__serve_build_asgi_app__` in it, so that no application is sent between processes."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._app: ASGIApp | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engine and return the application once the model is loaded."""
        from forebay.base.log import setup_logging
        from forebay.cli.serve import parse
        from forebay.cli.serving import connect
        from forebay.cluster.ingress import embedded
        from forebay.cluster.surroundings import restore_priorities, wanted
        from forebay.engine.lifecycle.launch import configure
        from forebay.engine.lifecycle.spawn import spawn
        from forebay.server.app import create_app, create_context

        restore_priorities(wanted((), os.getppid()))
        os.environ.pop("OMP_NUM_THREADS", None)
        config = parse(self._words).resolve()
        setup_logging(config.server.log_level, process="server", format=config.server.log_format)
        engine, tokenizer, model = await connect(config, configure(spawn(), config.engine))
        context = create_context(config.server, model, engine, tokenizer)
        engine.link.on_sleep, engine.link.on_wake = tokenizer.release_memory, tokenizer.wake

        async def close() -> None:
            context.lifecycle.draining = True
            await engine.close(drain_s=0.0)
            context.json_workers.close()
            context.workers.close()
            context.grammars.close()

        await engine.ready()
        self._app = embedded(create_app(context), close)
        return self._app

    async def check_health(self) -> None:
        """Raise Unavailable if `/health` is not 200; Serve then replaces the replica."""
        from forebay.cluster.ingress import status_of

        if self._app is not None and (status := await status_of(self._app, "/health")) != http.HTTPStatus.OK:
            raise Unavailable(f"/health answered {status}")


def serve_app(
    options: Sequence[str], *, num_replicas: int = 1, num_cpus: float = 1.0, num_gpus: float = 0.0, **deployment: Any
) -> Any:
    """Return an application for `ray.serve.run`. `options` are the words of `forebay serve`, with `--num-threads` for
    `num_cpus`; `deployment` has further options of a deployment of Serve. Raises ConfigError without Serve."""
    try:
        from ray import serve
    except ImportError:
        raise ConfigError("serve_app needs Ray Serve, which is not installed: pip install 'ray[serve]'") from None
    for word in options:
        if word.split("=")[0] in ("--api-key", "--admin-api-key"):
            raise ConfigError(f"{word.split('=')[0]}: Ray would store the key with the replica's arguments: use a file")
    settings: dict[str, Any] = {"max_ongoing_requests": 256, **deployment}
    settings["ray_actor_options"] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        **settings.get("ray_actor_options", {}),
    }
    ingress = serve.deployment(name="forebay", num_replicas=num_replicas, **settings)(serve.ingress()(Ingress))
    return ingress.bind(list(options))
