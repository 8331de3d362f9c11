"""State that the router's routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from forebay.config.config import ServerConfig
from forebay.http.bodies import INLINE_BYTES, Bodies
from forebay.http.exporting import make_tracer
from forebay.http.lifecycle import Lifecycle
from forebay.http.preparation import Client, Preparation
from forebay.http.security import Tenant
from forebay.http.workers import Workers
from forebay.requests.updates import Failure
from forebay.route.exchange import Exchange
from forebay.route.members import Members
from forebay.route.metrics import RouteMetrics
from forebay.route.prefixes import PromptBlocks

MOST_REQUESTS: Final = 1 << 12  # at once; members refuse what they have no room for


class Router:
    """Everything behind the door: `http.listen` serves it and at last closes it. Belongs to one event loop."""

    def __init__(self, config: ServerConfig, members: Members) -> None:
        self.config, self.members = config, members
        self.metrics = RouteMetrics()
        self.tracer = make_tracer(config, "forebay-router", self.metrics.count_spans_dropped)
        self.lifecycle = Lifecycle(lambda: MOST_REQUESTS, config.tenants)
        self.dead: Failure | None = None
        self.under_way: set[Exchange] = set()
        self._worker = Workers(Preparation(config.tenants).lane("JSON", 1))
        self._prompts = PromptBlocks(config.cache_isolation, config.cluster_key)
        self.bodies = Bodies(config.max_body_bytes, self._worker, config.tenants)
        self._died = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        """The id of this start of the router."""
        return self.members.router_id

    async def blocks(self, client: Client, tenant: Tenant, content: bytes) -> list[bytes]:
        """Return the blocks of the prompt in a tenant's body; a large body is read beside the event loop."""
        if len(content) <= INLINE_BYTES:
            return self._prompts.of_body(tenant, content)
        return await self._worker.run(client, partial(self._prompts.of_body, tenant, content))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside everything else, until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def die(self, failure: Failure) -> None:
        """End the router after a fatal error."""
        self.dead = self.dead or failure
        self._died.set()

    async def died(self) -> Failure:
        """Wait until a server process has died for good, and return why."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    async def close(self, drain_s: float) -> None:
        """End all requests and background tasks, and close the connections."""
        for exchange in list(self.under_way):
            exchange.end()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.members.close()
        self._worker.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
