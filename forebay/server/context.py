"""What every route shares, and what is known about one request before its route runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from forebay.base.errors import NotFound, PayloadTooLarge
from forebay.config.engine_config import ServerConfig
from forebay.server.errors import HttpError
from forebay.server.http_protocol import CONNECTION, Connection
from forebay.server.json_body import parse_json_object
from forebay.server.lifecycle import Lifecycle
from forebay.server.metrics import Metrics
from forebay.server.security import Security
from forebay.server.served_model import Engine, ServedModel
from forebay.server.text_workers import TextWorkers
from forebay.text.tokenizer import Tokenizer

REQUEST: Final = "forebay.request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    config: ServerConfig
    model: ServedModel
    engine: Engine
    tokenizer: Tokenizer
    security: Security
    lifecycle: Lifecycle
    metrics: Metrics
    workers: TextWorkers
    started_at: float

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise NotFound(
                f"the model {name[:200]!a} is not served here; {self.model.name} is",
                code="model_not_found",
                param="model",
            )


class ClientGone(Exception):
    """The client went away; there is nobody to answer."""


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """`send` and `connection` are below every middleware: a stream's chunks go straight there."""

    request_id: str
    tenant: str
    receive: Receive
    send: Send
    connection: Connection
    arrived_at: float

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        context: RequestContext = scope[REQUEST]
        return context


def new_request_context(scope: Scope, receive: Receive, send: Send, request_id: str, tenant: str) -> RequestContext:
    return RequestContext(
        request_id=request_id,
        tenant=tenant,
        receive=receive,
        send=send,
        connection=scope["extensions"][CONNECTION],
        arrived_at=time.monotonic(),
    )


async def read_json(scope: Scope, context: RequestContext, limit: int) -> dict[str, Any]:
    """The request's JSON object. Raises PayloadTooLarge as soon as more than `limit` bytes are announced or arrive."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    if len(kinds) != 1 or kinds[0].split(b";")[0].strip().lower() != b"application/json":
        raise HttpError(415, "send the body as `Content-Type: application/json`", code="unsupported_media_type")
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in scope["headers"]):
        raise HttpError(415, "compressed bodies are not read: send it as it is", code="unsupported_content_encoding")
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    if announced and announced[0].isdigit() and int(announced[0][:20]) > limit:
        raise _too_large(int(announced[0][:20]), limit)
    body = bytearray()
    while True:
        message = await context.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(len(body), limit)
        if not message.get("more_body", False):
            return parse_json_object(bytes(body))


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has {size} bytes or more; at most {limit} are read: raise --max-body-bytes")
