"""Probes of the server: /health, /ready and /metrics."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.admin.state import Health, state_for, unfit
from forebay.server.context import RequestContext, ServerContext

TICK_LIMIT_S: Final = 5.0


def _sickness(server: ServerContext) -> tuple[str, str] | None:
    """Why no work is done although there should be, as (reason code, text); None for a healthy engine."""
    engine = server.engine
    if engine.link.dead is not None:
        return "engine_dead", engine.link.dead.message
    if server.loaded_info is None:
        return "starting", "the model is still loading"
    if engine.link.last_tick_age_s > TICK_LIMIT_S:
        return "engine_stalled", f"the engine was last heard of {engine.link.last_tick_age_s:.1f} s ago"
    beat = engine.link.last_beat
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
        return json_response({"status": "ok", "reason": _phase_without_service(server) or "ok"})
    if sickness[0] == "starting":
        return json_response({"status": "ok", "reason": "starting"})
    return unfit("unhealthy", *sickness)


def _phase_without_service(server: ServerContext) -> str | None:
    """Return the engine's phase by its last update if it does not serve; None if it does."""
    state = server.engine.link.last_state
    return None if state is None or state.memory.phase == "serving" else state.memory.phase


async def ready(request: Request, server: ServerContext) -> Response:
    """Return whether a request would be taken now. 200, or 503 with `reason`. One that requests wake takes them
    asleep."""
    sickness = _sickness(server)
    if sickness is not None:
        return unfit("not_ready", *sickness)
    if (phase := _phase_without_service(server)) and not server.model.wakes_on_request:
        return unfit("not_ready", phase, "the engine does not serve: its memory was released, or it was told to pause")
    if server.lifecycle.draining:
        return unfit("not_ready", "draining", "the server is shutting down")
    if server.lifecycle.is_full(RequestContext.of(request.scope).tenant.name):
        return unfit("not_ready", "queue_full", "the queue is full")
    return json_response({"status": "ok", "reason": "ok"})


async def metrics(request: Request, server: ServerContext) -> Response:
    """Return all metrics in Prometheus' text format 0.0.4, or as OpenMetrics if the client accepts that. If the engine
    does not answer, they are those of the server alone."""
    accepted = request.headers.get("accept", "")
    text, media_type = server.metrics.render(await state_for(request, server), server.loaded_info, accepted)
    return Response(text, media_type=media_type)


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/health",
        health,
        answer=Health,
        unavailable=Health,
        text="200 while the engine answers. For liveness probes; needs no key.",
        access=Access.PROBE,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        "/ready",
        ready,
        answer=Health,
        unavailable=Health,
        text="200 while requests are taken. For readiness probes.",
        access=Access.MEMBER,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        "/metrics",
        metrics,
        answer=str,
        media="text/plain",
        text="Counters and gauges for Prometheus.",
        access=Access.TOTALS,
        forward=Forward.OWN,
    ),
)
