"""The routes that tell: models, tokens, health, metrics, state, configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.base.exposure import is_loopback
from forebay.base.log import event, get_logger
from forebay.base.package import __version__
from forebay.base.sampling import OF_MODELS
from forebay.config.config import SETTINGS, as_divided
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.frames import LoadedAdapter, Ready, State
from forebay.scheduler.state import PoolState
from forebay.server.admin.occupation import Occupied
from forebay.server.api.rendezvous import check_named
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.administration import CheckTransfersRequest
from forebay.server.served_model import LIMITS


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that this server serves, as OpenAI's clients list it. `max_model_len` is its context length in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    root: str | UnsetType = UNSET  # of an adapter: its folder
    parent: str | UnsetType = UNSET  # the model that it is added to


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of /v1/models: the one model that is served, and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


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


class ModelInfo(TypedDict):
    """The answer of /model_info: names, paths and limits of the model, in SGLang's words."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None


class AnswerFormats(TypedDict):
    """How the model spells calls and thinking; null where it has none that is known."""

    tool_calls: str | None
    reasoning: str | None
    evidence: dict[str, str]


SamplingValues = TypedDict(
    "SamplingValues",
    {"source": str, **{number.name: int if number.is_whole else float for number in OF_MODELS}},  # type: ignore[misc]
)
"""Default sampling values of requests, and their source."""


class Texts(TypedDict):
    """How texts become vectors, and what a score is: how likely an answer is, or the cosine of two vectors."""

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    scores: Literal["yes_no", "cosine"]
    evidence: dict[str, str | None]


class ServerInfo(TypedDict):
    """The answer of /server_info: the configuration in effect, and what the model's answers and texts can be."""

    served_model_name: str
    model_path: str
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int | None
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None
    version: str
    weight_version: str
    answers: AnswerFormats
    end_tokens: dict[str, str]
    texts: Texts
    sampling: SamplingValues
    accepts_images: bool
    settings: list[dict[str, Any]]
    engine: dict[str, Any] | None
    server: dict[str, Any]
    state: dict[str, Any] | None
    may_administer: bool


class Flushed(TypedDict):
    """The answer of /flush_cache: the pools after the prefix cache was emptied."""

    success: Literal[True]
    pools: list[PoolState]


class Checked(TypedDict):
    """By `transport`; `bytes_per_s` is 0 where there was too little to tell. `layout` is the same on both sides but for
    the page size, and `wrong` the columns that hold something else than was sent."""

    num_bytes: int
    bytes_per_s: float
    transport: str
    layout: dict[str, Any]
    wrong: list[str]


TICK_LIMIT_S: Final = 5.0
STATE_TIMEOUT_S: Final = 2.0

log = get_logger("server")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _unfit(status: str, reason: str, message: str) -> Response:
    answer = _json({"status": status, "reason": reason, "message": message}, 503)
    answer.headers["retry-after"] = "1"  # as other answers of 503 have it
    return answer


def _card(server: ServerContext, adapter: LoadedAdapter | None = None) -> ModelCard:
    """Return the card of an adapter, without one that of the model."""
    info = _info(server)
    return ModelCard(
        id=server.model.name if adapter is None else adapter.name,
        object="model",
        created=server.model.created,
        owned_by="forebay",
        max_model_len=info.context_length if info is not None else None,
        root=UNSET if adapter is None else adapter.path,
        parent=UNSET if adapter is None else server.model.name,
    )


def _info(server: ServerContext) -> Ready | None:
    try:
        return server.engine.info
    except ForebayError:
        return None


async def models(request: Request, server: ServerContext) -> Response:
    """List the model and its adapters."""
    found = server.engine.adapters.values() if _info(server) is not None else ()
    return _json(ModelList(object="list", data=[_card(server), *(_card(server, adapter) for adapter in found)]))


async def model(request: Request, server: ServerContext) -> Response:
    """Describe the model of this name; another name is answered with 404."""
    context = RequestContext.of(request.scope)
    server.check_model(context, request.path_params["model_id"])
    return _json(_card(server, server.engine.adapters[context.adapter] if context.adapter else None))


def _sickness(server: ServerContext) -> tuple[str, str] | None:
    """Why no work is done although there should be, as (reason code, text); None for a healthy engine."""
    engine = server.engine
    if engine.dead is not None:
        return "engine_dead", engine.dead.message
    if _info(server) is None:
        return "starting", "the model is still loading"
    if engine.last_tick_age_s > TICK_LIMIT_S:
        return "engine_stalled", f"the engine was last heard of {engine.last_tick_age_s:.1f} s ago"
    beat = engine.last_beat
    if beat is not None and beat.step_age_s > beat.step_limit_s:
        age, limit = beat.step_age_s, beat.step_limit_s
        return "step_stalled", f"no step has completed for {age:.1f} s; one like this is expected within {limit:.1f} s"
    return None


async def health(request: Request, server: ServerContext) -> Response:
    """Liveness: is work being done? Runs nothing. 200 `{"status": "ok"}` or 503 with `reason` and `message`.

    A loading model is alive: `reason` is then `starting`. So is one that is `asleep`, or on its way there or back.
    """
    sickness = _sickness(server)
    if sickness is None:
        return _json({"status": "ok", "reason": _rest(server) or "ok"})
    if sickness[0] == "starting":
        return _json({"status": "ok", "reason": "starting"})
    return _unfit("unhealthy", *sickness)


def _rest(server: ServerContext) -> str | None:
    """Return what the engine does instead of serving, by its last update; None if it serves."""
    state = server.engine.last_state
    return None if state is None or state.memory.phase == "serving" else state.memory.phase


async def ready(request: Request, server: ServerContext) -> Response:
    """Return whether a request would be taken now. 200, or 503 with `reason`. One that requests wake takes them
    asleep."""
    sickness = _sickness(server)
    if sickness is not None:
        return _unfit("not_ready", *sickness)
    if (rest := _rest(server)) and not server.model.wakes_on_request:
        return _unfit("not_ready", rest, "the engine does not serve: its memory was released, or it was told to pause")
    if server.lifecycle.draining:
        return _unfit("not_ready", "draining", "the server is shutting down")
    if server.lifecycle.is_full(RequestContext.of(request.scope).tenant.name):
        return _unfit("not_ready", "queue_full", "the queue is full")
    return _json({"status": "ok", "reason": "ok"})


async def current_state(server: ServerContext) -> State | None:
    """The engine's state now, or as of its last report where it does not answer."""
    try:
        return await asyncio.wait_for(server.engine.state(), STATE_TIMEOUT_S)
    except (ForebayError, TimeoutError):
        return server.engine.last_state


async def _state_for(request: Request, server: ServerContext) -> State | None:
    """Return the part of the state that the caller may see: the tenants are for admins alone (C29)."""
    state = await current_state(server)
    if state is None or RequestContext.of(request.scope).tenant.is_admin:
        return state
    return msgspec.structs.replace(state, tenants=[])


async def metrics(request: Request, server: ServerContext) -> Response:
    """Return all metrics in Prometheus' text format 0.0.4. If the engine does not answer, those of the server alone."""
    text = server.metrics.render(await _state_for(request, server), _info(server))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def debug_state(request: Request, server: ServerContext) -> Response:
    """`frames.State` as JSON, for the console's strip and for tests:

    `{"step", "num_running", "num_waiting", "num_waiting_tokens", "pools": [{"name": "kv"|"window"|"state"|"rows",
    "total", "free", "running", "cached", "quarantined"}], "last_step_age_s", "oldest_wait_s",
    "counters": {name: number}, "map": [0 free | 1 running | 2 cached | 3 other, ...],
    "memory": {"phase": "serving"|"draining"|"asleep"|"waking", "released": [tag, ...], "num_bytes": {tag: number}, ..},
    "server": {"num_inside", "draining"}}`
    """
    state = await _state_for(request, server)
    if state is None:
        return _unfit("not_ready", "starting", "the model is still loading")
    inside = {"num_inside": server.lifecycle.num_inside, "draining": server.lifecycle.draining}
    values = msgspec.to_builtins(state)
    values.pop("type", None)
    return _json({**values, "server": inside})


def _end_tokens(server: ServerContext, of_config: Sequence[int]) -> dict[str, str]:
    """Return the reason of each token that ends an answer, by its spelling."""
    reasons = {**server.model.end_tokens, **dict.fromkeys(of_config, "the configuration's eos_token_id")}
    table = server.tokenizer.table
    return {table.spelled(token).decode(errors="replace") or str(token): why for token, why in reasons.items()}


async def server_info(request: Request, server: ServerContext) -> Response:
    """The effective configuration: what each value is, who set it and why; what memory was divided into; limits. The
    state only for whom /debug/state is.

    What is on top, and that there is no /version, is what gateways of the field know such a server by. They take all of
    it or nothing: `weight_version` is text there, and `model`, had we one, would have to be."""
    info = _info(server)
    tenant = RequestContext.of(request.scope).tenant
    may_see_totals = server.security.may_see_totals(tenant)
    config = server.config
    elsewhere = {"api_keys", "admin_api_keys", "key_names", "tenants", "sampling"}
    state = await _state_for(request, server)
    names = (field.name for field in fields(config))
    limits = {name: getattr(config, name) for name in names if name not in elsewhere}
    return _json(
        {
            "served_model_name": server.model.name,
            "model_path": server.model.path,
            "disaggregation_mode": server.model.mode,
            "disaggregation_bootstrap_port": (info.bootstrap_port or None) if info else None,
            **{name: getattr(info, name, None) for name in LIMITS},
            "version": __version__,
            "answers": {
                "tool_calls": server.model.answers.formats.calls,
                "reasoning": server.model.answers.formats.thinking,
                "evidence": dict(server.model.answers.evidence),
            },
            "end_tokens": _end_tokens(server, [] if info is None else info.eos_token_ids),
            "sampling": {
                "source": config.sampling.source,
                **{number.name: getattr(server.sampling, number.name) for number in OF_MODELS},
            },
            "texts": server.model.texts.evidence,
            "accepts_images": server.images is not None and not server.images.why_not,
            "settings": as_divided(server.model.settings, [] if info is None else info.report),
            "engine": None if info is None else {**msgspec.to_builtins(info), "report": _report(info)},
            "server": limits,
            "weight_version": str(0 if state is None else state.memory.weight_version),
            "state": state if may_see_totals else None,
            "may_administer": server.security.may_administer(tenant),
        }
    )


async def model_info(request: Request, server: ServerContext) -> Response:
    """Return the model's part of the information, for gateways that use a route of its own."""
    info = _info(server)
    return _json(
        {
            "model_path": server.model.path,
            "tokenizer_path": server.model.path,
            "served_model_name": server.model.name,
            "is_generation": True,
            **{name: getattr(info, name, None) for name in LIMITS},
        }
    )


def _report(info: Ready) -> list[dict[str, str]]:
    return [
        dict(zip(("section", "item", "value", "reason"), row, strict=True)) for row in info.report if row[0] != SETTINGS
    ]


async def flush_cache(request: Request, server: ServerContext) -> Response:
    """Drop every cached prefix that no request holds; the pools as of after that."""
    state = await asyncio.wait_for(server.engine.flush_cache(), server.model.stall_timeout_s)
    log.info(event("cache_flushed", id=RequestContext.of(request.scope).request_id))
    return _json({"success": True, "pools": state.pools})


async def check_transfers(request: Request, server: ServerContext) -> Response:
    """Test the transfers of a decode server: fetch a pattern through every column from a prefill server, into places of
    its own."""
    body = await read_body(request, server, CheckTransfersRequest)
    context = RequestContext.of(request.scope)
    decodes = server.model.mode is DisaggregationMode.DECODE
    if decodes and not (context.tenant.is_admin or is_loopback(body.bootstrap_host)):
        check_named(server.cluster, context.sender, [(body.bootstrap_host, body.bootstrap_port)])
    checked = await server.engine.check_transfers(body.bootstrap_host, body.bootstrap_port)
    log.info(event("transfers_checked", id=context.request_id, wrong=len(checked.wrong)))
    return _json(checked)
