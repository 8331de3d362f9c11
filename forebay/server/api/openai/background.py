"""Responses that are made in the background: their clients have left, and ask for them by id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.types import Message

from forebay.base.errors import ForebayError
from forebay.http.errors import internal, shown
from forebay.http.lifecycle import ClientGone, Watch
from forebay.http.preparation import Client
from forebay.http.security import Tenant

Answer: TypeAlias = Callable[[Client], Awaitable[object]]
Ended: TypeAlias = Callable[[str, dict[str, Any] | None], None]
"""Called with the status and the error of a response that has no answer."""


@dataclass(slots=True)
class _Job:
    """A response under way. Once `cancelled` is set, its client counts as gone."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Return that the client is gone, once it is."""
        await self.cancelled.wait()
        return {"type": "http.disconnect"}


@dataclass(slots=True)
class Background:
    """The responses under way, by API key and id. Belongs to the event loop."""

    _jobs: dict[tuple[str, str], _Job] = field(default_factory=dict)

    def start(self, tenant: Tenant, response_id: str, answer: Answer, arrived_at: float, ended: Ended) -> None:
        """Run `answer` with a client that stays until it is cancelled."""
        job, key = _Job(), (tenant.digest, response_id)
        client = Client(Watch(job.receive), tenant.name, arrived_at)
        client.watch.start()
        self._jobs[key] = job
        job.task = asyncio.create_task(self._run(key, answer(client), ended, client.watch))

    async def _run(self, key: tuple[str, str], answering: Awaitable[object], ended: Ended, watch: Watch) -> None:
        try:
            await answering
        except ClientGone:
            ended("cancelled", None)
        except ForebayError as error:
            ended("failed", {"code": error.code, "message": shown(error)})
        except Exception as error:
            failure = internal(error, "background response")
            ended("failed", {"code": failure.code, "message": shown(failure)})
        finally:
            watch.stop()
            del self._jobs[key]

    async def cancel(self, tenant: Tenant, response_id: str) -> bool:
        """End a response under way, and wait for its end. Return False if there is none."""
        job = self._jobs.get((tenant.digest, response_id))
        if job is None or job.task is None:
            return False
        job.cancelled.set()
        await asyncio.wait([job.task])
        return True
