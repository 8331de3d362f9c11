"""The state of the engine: /debug/state."""

from __future__ import annotations

import asyncio
from typing import Final, Literal, NotRequired, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.engine.frames import State
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.scheduler.state import PoolState
from forebay.server.admin.occupation import Occupied
from forebay.server.context import RequestContext, ServerContext

STATE_TIMEOUT_S: Final = 2.0


class Health(TypedDict):
    """`reason` is a code, `message` its words where something is wrong."""

    status: Literal["ok", "unhealthy", "not_ready"]
    reason: str
    message: NotRequired[str]


class Inside(TypedDict):
    """Requests inside the server, and whether it has begun to shut down."""

    num_inside: int
    draining: bool


class DebugState(TypedDict):
    """The answer of /debug/state: the scheduler's counts, the state of each pool, and the memory by tag."""

    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    pools: list[PoolState]
    last_step_age_s: float
    oldest_wait_s: float
    counters: dict[str, float]
    map: list[int]
    memory: Occupied
    server: Inside


def unfit(status: str, reason: str, message: str) -> Response:
    """Return status 503 with its reason."""
    answer = json_response({"status": status, "reason": reason, "message": message}, 503)
    answer.headers["retry-after"] = "1"  # as other answers of 503 have it
    return answer


async def current_state(server: ServerContext) -> State | None:
    """Return the engine's state now; if the engine does not answer, the state of its last report."""
    try:
        return await asyncio.wait_for(server.engine.state(), STATE_TIMEOUT_S)
    except (ForebayError, TimeoutError):
        return server.engine.link.last_state


async def state_for(request: Request, server: ServerContext) -> State | None:
    """Return the part of the state that the caller may see: the tenants are for admins alone (C29)."""
    state = await current_state(server)
    if state is None or RequestContext.of(request.scope).tenant.is_admin:
        return state
    return msgspec.structs.replace(state, tenants=[])


async def debug_state(request: Request, server: ServerContext) -> Response:
    """`frames.State` as JSON, for the console's strip and for tests:

    `{"step", "num_running", "num_waiting", "num_waiting_tokens", "pools": [{"name": "kv"|"window"|"state"|"rows",
    "total", "free", "running", "cached", "quarantined"}], "last_step_age_s", "oldest_wait_s",
    "counters": {name: number}, "map": [0 free | 1 running | 2 cached | 3 other, ...],
    "memory": {"phase": "serving"|"draining"|"asleep"|"waking", "released": [tag, ...], "num_bytes": {tag: number}, ..},
    "server": {"num_inside", "draining"}}`
    """
    state = await state_for(request, server)
    if state is None:
        return unfit("not_ready", "starting", "the model is still loading")
    inside = {"num_inside": server.lifecycle.num_inside, "draining": server.lifecycle.draining}
    values = msgspec.to_builtins(state)
    values.pop("type", None)
    return json_response({**values, "server": inside})


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/debug/state",
        debug_state,
        answer=DebugState,
        unavailable=Health,
        text="What the engine holds now: pools, counters, memory.",
        access=Access.TOTALS,
        forward=Forward.OWN,
    ),
)
