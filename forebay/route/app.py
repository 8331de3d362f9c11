"""The router's routes: those of a server, each asked of the members that know."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.base.errors import ForebayError, InvalidRequest, Unavailable
from forebay.base.package import __version__
from forebay.config.engine_config import DisaggregationMode
from forebay.route.members import Member, as_object
from forebay.route.request_pair import Refused, RequestPair, RoutedRequest, first_answer, send_request
from forebay.route.router import Router
from forebay.route.upstream import MEMBER_LOST, Head
from forebay.server.assets import file_endpoint, pass_on, with_cors
from forebay.server.console import load_assets
from forebay.server.context import RequestContext
from forebay.server.gateway import Gateway
from forebay.server.http.bodies import ClientGone
from forebay.server.http.errors import MESSAGES, RESPONSES, error_ending
from forebay.server.http.lifecycle import Watch
from forebay.server.http.protocol import Connection
from forebay.server.http.security import Cluster, Security
from forebay.server.served_model import LIMITS

ASK_TIMEOUT_S: Final = 30.0
_PASSED_ON: Final = ("authorization", "content-encoding", "content-type", "x-api-key")
_PASSED_BACK: Final = ("content-type", "cache-control", "retry-after", "x-forebay-ignored")


Handler = Callable[[Request, Router], Awaitable[Response]]


async def generate(request: Request, router: Router) -> Response:
    """Send a request to a prefill and a decode server and return decode's answer."""
    context = RequestContext.of(request.scope)
    async with contextlib.AsyncExitStack() as undo:
        async with router.bodies.content(request.scope, context.receive) as content:
            undo.enter_context(router.lifecycle.admit(context.tenant.name, 1))
            watch = undo.enter_context(Watch(context.receive))
            routed = RoutedRequest(
                path=_path(request),
                headers=_passed_on(request, context),
                content=content,
                blocks=await router.blocks(content),
            )
            try:
                pair, head = await first_answer(router.members, routed, watch)
            except Refused as refused:
                router.metrics.count_error(refused.code)
                return Response(refused.body, refused.status, _passed_back(refused.head))
            except ForebayError:
                if watch.gone:
                    raise ClientGone from None
                raise
        router.under_way.add(pair)
        undo.callback(router.under_way.discard, pair)
        undo.callback(_end, router, pair)
        if "content-length" in head.headers:  # a stream has none, of events or of lines
            return Response(await _whole(pair), headers=_passed_back(head))
        return _Relayed(context.connection, context.send, pair, _passed_back(head), undo.pop_all())


async def _whole(pair: RequestPair) -> bytes:
    try:
        return await pair.decode.upstream.whole()
    except ForebayError:
        if pair.gone:
            raise ClientGone from None
        raise


def _end(router: Router, pair: RequestPair) -> None:
    """Prefill may still be told that all has arrived: that is not the client's to wait for."""
    if pair.decode.upstream.at_rest and not pair.gone:
        router.spawn(pair.drain())
        pair.decode.end()
    else:
        pair.end()


class _Relayed(Response):
    """A stream, piece by piece as it comes. Owns `undo`, which ends the request at both servers."""

    def __init__(
        self,
        connection: Connection,
        send: Send,
        pair: RequestPair,
        headers: dict[str, str],
        undo: contextlib.AsyncExitStack,
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._connection, self._send, self._pair, self._undo = connection, send, pair, undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._undo:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            upstream, ending = self._pair.decode.upstream, b""
            upstream.relay(self._write)
            try:
                await upstream.ended()
            except ForebayError as error:
                ending = error_ending(error, scope["path"])
            await self._send({"type": "http.response.body", "body": ending, "more_body": False})

    def _write(self, piece: bytes) -> None:
        if not self._connection.write_chunk(piece):
            self._pair.abort()


async def abort_request(request: Request, router: Router) -> Response:
    """Ids are known to servers, each of which computes a part, and the router does not know whose they are."""
    raise InvalidRequest(
        "/abort_request is not answered by a router: close the request's connection, which ends it at both servers",
        code="unsupported_route",
    )


async def forward(request: Request, router: Router) -> Response:
    """The answer of a decode server, which knows as much as any other."""
    context, member = RequestContext.of(request.scope), router.members.choose_decode()
    if request.method != "POST":
        return _answered(await _ask(request, member))
    async with router.bodies.content(request.scope, context.receive) as content:
        return _answered(await _ask(request, member, content))


async def _ask(request: Request, member: Member, content: bytes | None = None) -> tuple[Head, bytes]:
    headers = _passed_on(request, RequestContext.of(request.scope))
    asked = member.pool.ask(request.method, _path(request), headers, content)
    try:
        return await asyncio.wait_for(asked, ASK_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(f"{member.name} has not answered within {ASK_TIMEOUT_S:g} s", code=MEMBER_LOST) from None


def _answered(answer: tuple[Head, bytes]) -> Response:
    head, body = answer
    return Response(body, status_code=head.status, headers=_passed_back(head))


async def pooled(request: Request, router: Router) -> Response:
    """The answer of a prefill server, which computes all of it: nothing comes behind these prompts."""
    context = RequestContext.of(request.scope)
    async with router.bodies.content(request.scope, context.receive) as content:
        with router.lifecycle.admit(context.tenant.name, 1), Watch(context.receive) as watch:
            member = router.members.choose_prefill(())
            headers = _passed_on(request, context)
            sent = await send_request(router.members, member, _path(request), headers, content)
            watch.on_gone(sent.end)
            try:
                return _answered((await sent.upstream.head(), await sent.upstream.whole()))
            except ForebayError as error:
                if watch.gone:
                    raise ClientGone from None
                router.members.lost(member, error.message)
                raise
            finally:
                sent.end()


async def flush_cache(request: Request, router: Router) -> Response:
    """At every member that is up. A body is not read, as no server reads one."""
    members = [member for member in router.members.all if member.up] or [router.members.choose_decode()]
    answers = await asyncio.gather(*(_ask(request, member, b"") for member in members))
    return _answered(max(answers, key=lambda answer: answer[0].status))


async def health(request: Request, router: Router) -> Response:
    """Report whether the router works at all; without any member up the reason is "starting"."""
    return _json({"status": "ok", "reason": "ok" if router.members.ready else "starting"})


async def ready(request: Request, router: Router) -> Response:
    """Report whether a request would be taken now: 503 while draining, or while a role has no member up."""
    if router.lifecycle.draining:
        return _unfit("draining", "the router is shutting down")
    if not router.members.ready:
        whys = [f"{member.role} {member.name}: {member.why}" for member in router.members.all if not member.up]
        return _unfit("starting", "; ".join(whys))
    return _json({"status": "ok", "reason": "ok"})


async def metrics(request: Request, router: Router) -> Response:
    """Render the router's metrics in the Prometheus text format."""
    return Response(router.metrics.render(router.members), media_type="text/plain; version=0.0.4; charset=utf-8")


async def server_info(request: Request, router: Router) -> Response:
    """Return the /server_info of all members together, for gateways and the page."""
    up = [member.info for member in router.members.decode if member.info]
    first = up[0] if up else {}
    limits = {name: first.get(name) for name in LIMITS}
    limits["max_running_requests"] = sum(info.get("max_running_requests") or 0 for info in up) or None
    return _json(
        {
            "served_model_name": first.get("served_model_name"),
            "model_path": first.get("model_path"),
            "disaggregation_mode": DisaggregationMode.NULL,
            **limits,
            "version": __version__,
            "engine": first.get("engine"),
            "members": [member.as_dict() for member in router.members.all],
        }
    )


async def debug_state(request: Request, router: Router) -> Response:
    """Return the state of all members that answer: their pools under their own names, and the sums of their
    counters."""
    headers = _passed_on(request, RequestContext.of(request.scope))
    answers = await asyncio.gather(*(_debug_report(member, headers) for member in router.members.all))
    told: list[dict[str, Any]] = [state for state in answers if "pools" in state]
    refused = [state["status"] for state in answers if "status" in state]
    if not told and refused:
        return _json({"error": {"message": "the servers do not tell", "code": "not_told"}}, max(refused))
    counters: dict[str, float] = {}
    for state in told:
        for name, value in state["counters"].items():
            counters[name] = counters.get(name, 0) + value
    pools = []
    for member, state in zip(router.members.all, answers, strict=True):
        pools += [{**pool, "name": f"{_short(router, member)} {pool['name']}"} for pool in state.get("pools", ())]
    return _json(
        {
            **{name: sum(state[name] for state in told) for name in ("num_running", "num_waiting")},
            "counters": counters,
            "pools": pools,
            "map": [cell for state in told for cell in state["map"]],
            "members": [{**member.as_dict(), "name": _short(router, member)} for member in router.members.all],
        }
    )


def _short(router: Router, member: Member) -> str:
    """`decode`, or `decode 2` where there are several."""
    same = [other for other in router.members.all if other.role is member.role]
    return str(member.role) if len(same) == 1 else f"{member.role} {same.index(member) + 1}"


async def _debug_report(member: Member, headers: dict[str, str]) -> dict[str, Any]:
    """Return a member's `/debug/state`: empty if it does not answer, its `status` if it refuses."""
    if not member.up:
        return {}
    try:
        head, body = await asyncio.wait_for(member.pool.ask("GET", "/debug/state", headers), ASK_TIMEOUT_S)
    except (ForebayError, TimeoutError):
        return {}
    return as_object(body) if head.status == 200 else {"status": head.status}


def _path(request: Request) -> str:
    """As the client wrote it, which is one word of a request's first line; decoded it could be several."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def _passed_on(request: Request, context: RequestContext) -> dict[str, str]:
    """Return the headers by which members know clients and read bodies. No other header of a client reaches a
    member."""
    kept = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    return {**kept, "x-request-id": context.request_id}


def _passed_back(head: Head) -> dict[str, str]:
    return {name: head.headers[name] for name in _PASSED_BACK if name in head.headers}


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _unfit(reason: str, message: str) -> Response:
    return _json({"status": "not_ready", "reason": reason, "message": message}, 503)


ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("POST", "/v1/chat/completions", generate),
    ("POST", "/v1/completions", generate),
    ("POST", "/generate", generate),
    ("POST", "/completion", generate),
    ("POST", "/apply-template", forward),
    ("POST", "/api/chat", generate),
    ("POST", "/api/generate", generate),
    ("POST", "/api/embed", pooled),
    ("POST", "/api/show", forward),
    ("GET", "/api/tags", forward),
    ("GET", "/api/version", forward),
    ("POST", "/abort_request", abort_request),
    ("POST", MESSAGES, generate),
    ("POST", f"{MESSAGES}/count_tokens", forward),
    ("POST", RESPONSES, generate),
    ("POST", f"{RESPONSES}/input_tokens", forward),
    ("GET", f"{RESPONSES}/{{response_id}}", forward),  # a server of one role says that it stores none
    ("DELETE", f"{RESPONSES}/{{response_id}}", forward),
    ("POST", "/v1/embeddings", pooled),
    ("POST", "/v1/score", pooled),
    ("POST", "/v1/rerank", pooled),
    ("GET", "/v1/models", forward),
    ("GET", "/v1/models/{model_id:path}", forward),
    ("POST", "/tokenize", forward),
    ("GET", "/tokenizer_info", forward),
    ("POST", "/detokenize", forward),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/server_info", server_info),
    ("GET", "/model_info", forward),
    ("GET", "/props", forward),
    ("GET", "/slots", forward),
    ("GET", "/debug/state", debug_state),
    ("POST", "/flush_cache", flush_cache),
)


def create_app(router: Router) -> ASGIApp:
    """The ASGI application; run it with `server.http.listen`."""
    assets = load_assets()
    routes = [Route(path, _endpoint(handler, router), methods=[method]) for method, path, handler in ROUTES]
    routes += [Route(path, file_endpoint(asset), methods=["GET"]) for path, asset in assets.items()]
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((ForebayError, 404, 405, Exception), pass_on))
    app.router.redirect_slashes = False
    paths = [path for _, path, _ in ROUTES]
    security, cluster = Security(router.config), Cluster(router.config)
    gateway = Gateway(app, security, cluster, router.metrics, paths=paths, public_paths=assets)
    return with_cors(gateway, router.config)


def _endpoint(handler: Handler, router: Router) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, router)

    return endpoint
