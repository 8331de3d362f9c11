"""The routes that describe the router and its members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError
from forebay.base.package import __version__
from forebay.config.engine_config import DisaggregationMode
from forebay.http.answers import json_response
from forebay.route.announcement import Role
from forebay.route.forwarding import ASK_TIMEOUT_S, answered, ask, name_servers, passed_on
from forebay.route.hops import PATH, shortest_path
from forebay.route.members import Member, as_object
from forebay.route.router import Router
from forebay.route.selection import Reason, Selected
from forebay.route.upstream import Head
from forebay.server.context import RequestContext
from forebay.server.served_model import LIMITS


async def forward(request: Request, router: Router) -> Response:
    """The answer of one server that answers clients: each knows as much as any other."""
    context, member = RequestContext.of(request.scope), router.members.select_for_answer()
    name_servers(context, Selected((member,), Reason.LOAD))
    if request.method != "POST":
        return answered(await ask(request, router.id, member))
    async with router.bodies.content(request.scope, context.client) as content:
        return answered(await ask(request, router.id, member, content))


async def health(request: Request, router: Router) -> Response:
    """Report whether the router works at all; without any member up the reason is "starting"."""
    return json_response({"status": "ok", "reason": "ok" if router.members.ready else "starting"})


async def ready(request: Request, router: Router) -> Response:
    """Report whether a request would be taken now: 503 while draining, or while a role has no member up."""
    if router.lifecycle.draining:
        return _unfit("draining", "the router is shutting down")
    if not router.members.ready:
        now = router.members.now
        obstacles = ((member, member.obstacle(now)) for member in router.members.all)
        whys = [f"{member.role} {member.url}: {why}" for member, why in obstacles if why]
        return _unfit("starting", "; ".join(whys) or "there is no server, or no pair with one weight version")
    return json_response({"status": "ok", "reason": "ok"})


def _unfit(reason: str, message: str) -> Response:
    return json_response({"status": "not_ready", "reason": reason, "message": message}, 503)


async def metrics(request: Request, router: Router) -> Response:
    """Render the router's metrics in the Prometheus text format."""
    return Response(router.metrics.render(router.members), media_type="text/plain; version=0.0.4; charset=utf-8")


async def server_info(request: Request, router: Router) -> Response:
    """Return the /server_info of all members together, for gateways and the page."""
    members = router.members
    up = [member.info for member in members.with_role(Role.DECODE, Role.BOTH) if member.info]
    infos = [member.info for member in members.usable(Role, members.now)]
    first = next(iter(up), {})
    return json_response(
        {
            "served_model_name": first.get("served_model_name"),
            "model_path": first.get("model_path"),
            "disaggregation_mode": DisaggregationMode.NULL,
            **{name: first.get(name) for name in LIMITS},
            "max_running_requests": sum(info.get("max_running_requests") or 0 for info in up) or None,
            "version": __version__,
            "accepts_images": bool(up) and all(info.get("accepts_images") for info in up),
            "engine": first.get("engine"),
            "environment": _common([info.get("environment") for info in infos]),
            PATH: shortest_path(members.router_id, infos),
            "members": [member.as_dict(members.now) for member in members.all],
        }
    )


def _common(values: Sequence[Any]) -> Any:
    """Return what all values are, None if they differ or there are none."""
    return values[0] if values and all(value == values[0] for value in values) else None


async def models(request: Request, router: Router) -> Response:
    """List the models, and the adapters that all members have that answer."""
    answers = await _answers(request, router)
    failed = next((answer for answer in answers if answer[0].status != 200), None)
    if failed is not None:
        return answered(failed)
    first, *others = (as_object(body) for _, body in answers)
    ids = [{card["id"] for card in other["data"]} for other in others]
    first["data"] = [card for card in first["data"] if all(card["id"] in known for known in ids)]
    return json_response(first)


async def model(request: Request, router: Router) -> Response:
    """Describe a model; an adapter that a member lacks is not found."""
    return answered(max(await _answers(request, router), key=lambda answer: answer[0].status))


async def stored(request: Request, router: Router) -> Response:
    """The answer of the server that stored a response, or answered a request: no other one knows it."""
    return answered(min(await _answers(request, router), key=lambda answer: answer[0].status))


async def _answers(request: Request, router: Router) -> list[tuple[Head, bytes]]:
    """Return the answers of all usable members that answer. Raises Unavailable if there are none."""
    members = router.members
    first = members.select_for_answer()
    name_servers(RequestContext.of(request.scope), Selected((first,), Reason.LOAD))
    others = [member for member in members.usable(Role, members.now) if member is not first]
    asked = (ask(request, router.id, member) for member in (first, *others))
    found = await asyncio.gather(*asked, return_exceptions=True)
    if answers := [answer for answer in found if not isinstance(answer, BaseException)]:
        return answers
    raise next(error for error in found if isinstance(error, BaseException))


async def debug_state(request: Request, router: Router) -> Response:
    """Return the state of all members that answer: their pools under their own names, and the sums of their
    counters."""
    headers = passed_on(request, router.id)
    members = router.members.all
    answers = await asyncio.gather(*(_debug_report(member, headers) for member in members))
    reports: list[dict[str, Any]] = [state for state in answers if "pools" in state]
    refused = [state["status"] for state in answers if "status" in state]
    if not reports and refused:
        return json_response({"error": {"message": "the servers do not tell", "code": "not_told"}}, max(refused))
    now = router.members.now
    named = [(_short(members, member), state) for member, state in zip(members, answers, strict=True)]
    return json_response(
        {
            **_totals(reports),
            "pools": [
                {**pool, "name": f"{name} {pool['name']}"} for name, state in named for pool in state.get("pools", ())
            ],
            "members": [{**member.as_dict(now), "name": _short(members, member)} for member in members],
        }
    )


def _totals(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the members' requests and counters, and their maps one after another."""
    counters: dict[str, float] = {}
    for state in reports:
        for name, value in state["counters"].items():
            counters[name] = counters.get(name, 0) + value
    return {
        **{name: sum(state[name] for state in reports) for name in ("num_running", "num_waiting")},
        "counters": counters,
        "map": [cell for state in reports for cell in state["map"]],
    }


def _short(members: list[Member], member: Member) -> str:
    """Return a short name: `decode`, or `decode 2` if there are several; a server of both roles is a `server`."""
    same = [other for other in members if other.role is member.role]
    name = "server" if member.role is Role.BOTH else str(member.role)
    return name if len(same) == 1 else f"{name} {same.index(member) + 1}"


async def _debug_report(member: Member, headers: dict[str, str]) -> dict[str, Any]:
    """Return a member's `/debug/state`: empty if it does not answer, its `status` if it refuses."""
    if not member.up:
        return {}
    try:
        head, body = await asyncio.wait_for(member.pool.ask("GET", "/debug/state", headers), ASK_TIMEOUT_S)
    except (ForebayError, TimeoutError):
        return {}
    return as_object(body) if head.status == 200 else {"status": head.status}
