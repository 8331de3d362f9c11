"""The gateway: every request passes here before any route. Host, key, request id, typed errors, metrics of refusals."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.base.errors import ForebayError, NotFound
from forebay.http.bodies import BODY_DIGEST
from forebay.http.errors import HttpError, error_response, internal
from forebay.http.lifecycle import ClientGone, Watch
from forebay.http.preparation import Client
from forebay.http.protocol import CONNECTION
from forebay.http.route import Access
from forebay.http.security import ANYBODY, AccessRules, Cluster, Security
from forebay.http.tracing import CLIENT_GONE, TRACE, note_error
from forebay.server.context import REQUEST, RequestContext

_PROBES: Final = {"/livez": "/health", "/ping": "/health", "/readyz": "/ready"}
_SAFE_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class CountsErrors(Protocol):
    """A counter of refusals, for metrics."""

    def count_error(self, code: str) -> None:
        """Count one refused request by the code of its error."""


class Gateway:
    """An ASGI application around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        security: Security,
        cluster: Cluster,
        metrics: CountsErrors,
        access: AccessRules,
    ) -> None:
        self._app = app
        self._security, self._cluster = security, cluster
        self._metrics = metrics
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets here
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # what GET would say; the connection, which keeps its own scope, sends no body
            scope = {**scope, "method": "GET"}
        request_id = _request_id(scope)
        if scope["path"] not in self._access.paths:
            scope = {**scope, "path": usual_path(scope["path"], self._access.paths)}
        watch = Watch(receive)
        answer = _Answer(send, [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")])
        try:
            # The decoded path as the router sees it, and nothing else: no header, no raw path, no root path.
            method, path, headers = scope["method"], scope["path"], scope["headers"]
            access = self._access.of(method, path)
            self._security.check_host(headers, public=access is Access.FILE)
            sender = self._cluster.sender(scope)
            if access is Access.CLUSTER:
                self._cluster.check_trusted(sender, is_open=self._security.open)
            has_proof = access is Access.CLUSTER or (access is Access.MEMBER and sender.digest != "")
            tenant = ANYBODY if has_proof else self._security.authorize(access, path, headers)
            scope[BODY_DIGEST] = sender.digest
            scope[REQUEST] = RequestContext(
                request_id=request_id,
                route=path,
                tenant=tenant,
                sender=sender,
                client=Client(watch, tenant.name, time.monotonic()),
                send=send,
                connection=scope["extensions"][CONNECTION],
                headers=answer.headers,
                trace=scope.get(TRACE),
            )
            await self._app(scope, receive, answer)
        except ClientGone:
            note_error(scope, CLIENT_GONE)
        except Exception as error:
            await self._refuse(_as_error(error, scope["path"]), scope, receive, answer)
        finally:
            watch.stop()

    async def _refuse(self, error: ForebayError, scope: Scope, receive: Receive, answer: _Answer) -> None:
        self._metrics.count_error(error.code)
        note_error(scope, error.code)
        if not answer.started:
            await error_response(error, scope["path"])(scope, receive, answer)


def usual_path(path: str, known: Collection[str]) -> str:
    """The spelling that is routed, and that keys are asked by, of one that clients have for it too: with a slash at its
    end, without `/v1`, or by the name of a probe."""
    short = _PROBES.get(path.rstrip("/"), path.rstrip("/"))
    return next((usual for usual in (short, f"/v1{short}") if usual in known), path)


@dataclass(slots=True)
class _Answer:
    """`send` that adds our headers to the response's start and knows whether there was one."""

    _send: Send
    headers: list[tuple[bytes, bytes]]
    started: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            names = {name for name, _ in message.get("headers", [])}
            ours = [header for header in self.headers if header[0] not in names]
            message = {**message, "headers": [*message.get("headers", []), *ours]}
        await self._send(message)


def _request_id(scope: Mapping[str, Any]) -> str:
    """Return the client's own label if it is safe to print, else a new one. It is a label only: the engine numbers
    requests itself."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return str(value.decode())
    return secrets.token_hex(12)


def _as_error(error: Exception, path: str) -> ForebayError:
    """Return the error for the client. An unexpected one is logged with the path."""
    if isinstance(error, ForebayError):
        return error
    return _routing_error(error) if isinstance(error, HTTPException) else internal(error, path[:100])


def _routing_error(error: HTTPException) -> ForebayError:
    if error.status_code == 404:
        return NotFound("there is no such route: see /openapi.json for those there are")
    if error.status_code == 405:
        return HttpError(405, "this route does not take that method", code="method_not_allowed")
    return HttpError(error.status_code, str(error.detail)[:200], code="http_error")
