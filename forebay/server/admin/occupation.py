"""The routes that give memory back and take it again, and pause. SGLang's, with vLLM's as aliases."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.base.log import event, get_logger
from forebay.engine.frames import TAGS, WEIGHTS, SaveCache, State
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.scheduler.state import PoolState
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.administration import PauseRequest, ReleaseRequest, ResumeRequest


class Sleeping(msgspec.Struct, kw_only=True):
    """The answer of /is_sleeping."""

    is_sleeping: bool


class Occupied(TypedDict):
    """The memory that the engine has of all that it can release."""

    phase: Literal["serving", "draining", "asleep", "waking"]
    released: list[str]
    paused: bool
    num_bytes: dict[str, int]
    weight_version: int
    last_sleep_s: float
    last_wake_s: float
    kept_tokens: int
    kept_bytes: int


class Done(Occupied):
    """The answer to a transition that was carried out: the memory that is occupied now."""

    success: Literal[True]


class Saved(TypedDict):
    """The answer of /save_cache."""

    success: Literal[True]


class Flushed(TypedDict):
    """The answer of /flush_cache: the pools after the prefix cache was emptied."""

    success: Literal[True]
    pools: list[PoolState]


# vLLM's: at the first the weights stay where they are.
_LEVELS: Final = {"1": [tag for tag in TAGS if tag != WEIGHTS], "2": list(TAGS)}

log = get_logger("server")


def occupied(request: Request, what: str, state: State) -> Response:
    """Log a transition, and return the memory that is occupied after it."""
    memory = state.memory
    released = ",".join(memory.released) or "none"
    log.info(event(what, id=RequestContext.of(request.scope).request_id, state=memory.phase, released=released))
    answer: dict[str, Any] = {"success": True, **msgspec.to_builtins(memory)}
    return json_response(answer)


async def flush_cache(request: Request, server: ServerContext) -> Response:
    """Drop every cached prefix that no request holds; the pools as of after that."""
    state = await asyncio.wait_for(server.engine.flush_cache(), server.model.stall_timeout_s)
    log.info(event("cache_flushed", id=RequestContext.of(request.scope).request_id))
    return json_response({"success": True, "pools": state.pools})


async def save_cache(request: Request, server: ServerContext) -> Response:
    """Write what is stored of the prefix cache to its files."""
    await server.engine.link.ask(SaveCache)
    log.info(event("cache_saved", id=RequestContext.of(request.scope).request_id))
    return json_response({"success": True})


async def release(request: Request, server: ServerContext) -> Response:
    """Give the memory of some tags back, all by default. `mode` says what becomes of requests that run: `wait`,
    `retract` or `abort`."""
    body = await read_body(request, server, ReleaseRequest)
    tags = list(TAGS) if body.tags is None else body.tags
    return occupied(request, "release", await server.engine.release(tags, mode=body.mode, timeout_s=body.timeout))


async def resume(request: Request, server: ServerContext) -> Response:
    """Take the memory of some tags again, by default of all that were released."""
    body = await read_body(request, server, ResumeRequest)
    engine = server.engine
    state = await (engine.wake_up() if body.tags is None else engine.resume(body.tags))
    return occupied(request, "resume", state)


async def pause(request: Request, server: ServerContext) -> Response:
    """Pause all requests until `/continue_generation`; no memory is released."""
    body = await read_body(request, server, PauseRequest)
    return occupied(request, "pause", await server.engine.release((), mode=body.mode, timeout_s=body.timeout))


async def continue_generation(request: Request, server: ServerContext) -> Response:
    """Resume the paused requests."""
    return occupied(request, "continue", await server.engine.resume(()))


async def sleep(request: Request, server: ServerContext) -> Response:
    """vLLM's release: `level` 1 keeps the weights, 2 does not."""
    level = request.query_params.get("level", "1")
    if level not in _LEVELS:
        raise InvalidRequest(f"level {level[:40]!a}: use 1, which keeps the weights, or 2", param="level")
    return occupied(request, "sleep", await server.engine.sleep(_LEVELS[level]))


async def wake_up(request: Request, server: ServerContext) -> Response:
    """vLLM's resume: `tags` may be given several times."""
    return occupied(request, "wake_up", await server.engine.wake_up(request.query_params.getlist("tags")))


async def is_sleeping(request: Request, server: ServerContext) -> Response:
    """`{"is_sleeping"}`"""
    sleeping = (await server.engine.state()).memory.phase != "serving"
    return json_response(Sleeping(is_sleeping=sleeping))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/flush_cache",
        flush_cache,
        answer=Flushed,
        empties_cache=True,
        text="Drop the prefix cache.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/save_cache",
        save_cache,
        answer=Saved,
        text="Write what is stored of the prefix cache to the files in `--prefix-cache-dir`; 409 without a folder.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/release_memory_occupation",
        release,
        body=ReleaseRequest,
        answer=Done,
        empties_cache=True,
        text="Give memory back, by tag, until it is taken again.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/resume_memory_occupation",
        resume,
        body=ResumeRequest,
        answer=Done,
        text="Take memory again that was given back.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/pause_generation",
        pause,
        body=PauseRequest,
        answer=Done,
        text="Stop computing, and keep all memory.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/continue_generation",
        continue_generation,
        answer=Done,
        text="Go on after a pause.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/sleep",
        sleep,
        answer=Done,
        empties_cache=True,
        text="Give memory back, as vLLM's clients say it.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "POST",
        "/wake_up",
        wake_up,
        answer=Done,
        text="Take it again, as vLLM's clients say it.",
        access=Access.ADMIN,
        forward=Forward.ALL,
    ),
    Route(
        "GET",
        "/is_sleeping",
        is_sleeping,
        answer=Sleeping,
        text="Whether memory is given back.",
        access=Access.USER,
        forward=Forward.NONE,
    ),
)
