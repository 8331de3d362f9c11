"""The routes that give memory back and take it again, pause, and change weights. SGLang's, with vLLM's as aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.base.log import event, get_logger
from forebay.engine.frames import TAGS, WEIGHTS, State
from forebay.formats.gguf_parts import part_paths
from forebay.formats.hub_names import BLOBS, REVISIONS
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.administration import PauseRequest, ReleaseRequest, ResumeRequest, UpdateWeightsRequest


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


# vLLM's: at the first the weights stay where they are.
_LEVELS: Final = {"1": [tag for tag in TAGS if tag != WEIGHTS], "2": list(TAGS)}

log = get_logger("server")


def _answer(request: Request, what: str, state: State) -> Response:
    memory = state.memory
    released = ",".join(memory.released) or "none"
    log.info(event(what, id=RequestContext.of(request.scope).request_id, state=memory.phase, released=released))
    told: dict[str, Any] = {"success": True, **msgspec.to_builtins(memory)}
    return Response(msgspec.json.encode(told), media_type="application/json")


async def release(request: Request, server: ServerContext) -> Response:
    """Give the memory of some tags back, all by default. `mode` says what becomes of requests that run: `wait`,
    `retract` or `abort`."""
    body = await read_body(request, server, ReleaseRequest)
    tags = list(TAGS) if body.tags is None else body.tags
    return _answer(request, "release", await server.engine.release(tags, mode=body.mode, timeout_s=body.timeout))


async def resume(request: Request, server: ServerContext) -> Response:
    """Take the memory of some tags again, by default of all that were released."""
    body = await read_body(request, server, ResumeRequest)
    engine = server.engine
    state = await (engine.wake_up() if body.tags is None else engine.resume(body.tags))
    return _answer(request, "resume", state)


async def pause(request: Request, server: ServerContext) -> Response:
    """Let no request go on until `/continue_generation`; nothing is released."""
    body = await read_body(request, server, PauseRequest)
    return _answer(request, "pause", await server.engine.release((), mode=body.mode, timeout_s=body.timeout))


async def go_on(request: Request, server: ServerContext) -> Response:
    """Let requests go on."""
    return _answer(request, "continue", await server.engine.resume(()))


async def sleep(request: Request, server: ServerContext) -> Response:
    """vLLM's release: `level` 1 keeps the weights, 2 does not."""
    level = request.query_params.get("level", "1")
    if level not in _LEVELS:
        raise InvalidRequest(f"level {level[:40]!a}: use 1, which keeps the weights, or 2", param="level")
    return _answer(request, "sleep", await server.engine.sleep(_LEVELS[level]))


async def wake_up(request: Request, server: ServerContext) -> Response:
    """vLLM's resume: `tags` may be given several times."""
    return _answer(request, "wake_up", await server.engine.wake_up(request.query_params.getlist("tags")))


async def is_sleeping(request: Request, server: ServerContext) -> Response:
    """`{"is_sleeping"}`"""
    sleeping = (await server.engine.state()).memory.phase != "serving"
    return Response(msgspec.json.encode(Sleeping(is_sleeping=sleeping)), media_type="application/json")


async def update_weights_from_disk(request: Request, server: ServerContext) -> Response:
    """Take the weights of another checkpoint of the same model, below --weights-root."""
    body = await read_body(request, server, UpdateWeightsRequest)
    path = _below(server.config.weights_root, body.model_path)
    state = await server.engine.update_weights(path, mode=body.mode, timeout_s=body.timeout)
    return _answer(request, "update_weights", state)


def _below(root: str | None, model_path: str) -> str:
    """The checkpoint at `model_path`, whose files are all below the root once links are followed. In a snapshot of a
    hub's cache they may link to the blobs of their repository."""
    if root is None:
        raise InvalidRequest("no weights are read over HTTP: start the server with --weights-root", param="model_path")
    top = Path(root).resolve()
    path = top / model_path  # unresolved: a snapshot's .gguf file is a link whose target has no suffix
    try:
        if not _stays(path, top):
            raise InvalidRequest(f"model_path {model_path[:200]!a} is not below --weights-root", param="model_path")
        files = path.iterdir() if path.is_dir() else part_paths(path)
        links = [file.name for file in files if not _stays(file, top)]
    except (OSError, ValueError, RuntimeError) as error:  # a circle of links among them
        raise InvalidRequest(f"model_path {model_path[:200]!a} cannot be read: {error}", param="model_path") from None
    if links:
        raise InvalidRequest(
            f"model_path {model_path[:200]!a}: {links[0][:200]!a} is a link that leads out of --weights-root: copy the "
            "file there",
            param="model_path",
        )
    return str(path)


def _stays(entry: Path, top: Path) -> bool:
    """Return whether it is below `top`, or a file of a snapshot there whose content is among the blobs of its
    repository."""
    target, revision = entry.resolve(), entry.parent.resolve()
    if target.is_relative_to(top):
        return True
    return (
        revision.is_relative_to(top)
        and revision.parent.name == REVISIONS
        and target.parent == revision.parent.parent / BLOBS
    )
