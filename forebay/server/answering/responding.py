"""The routes of /v1/responses."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.server.answering.calling import check_answerable
from forebay.server.answering.generate import naming, serve_chat
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.dialects.renaming import renamed
from forebay.server.dialects.responses import ResponsesDialect
from forebay.server.dialects.responses_items import Item, read, written
from forebay.server.dialects.responses_request import InputTokensRequest, ResponsesRequest
from forebay.server.protocol.requests import ChatRequest


async def responses(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, ResponsesRequest)
    server.check_model(body.model)
    if body.store:
        server.responses.check_is_on("store")
    stores = server.responses.is_on and body.store is not False
    chat, earlier = _resumed(server, context, body)
    keep = None
    if stores:
        keep = partial(_keep, server, context, [*earlier, *body.items])
    own = {"object": "response", "created_at": int(time.time()), "model": server.model.name}
    dialect = ResponsesDialect(
        fields={"id": f"resp_{context.request_id}", **own, **body.echo(stored=stores)},
        seals=body.wants_sealed,
        table=server.tokenizer.table if body.num_top >= 0 else None,
        text_tools=chat.text_tools,
        keep=keep,
    )
    with renamed(body.renamings):
        return await serve_chat(server, context, chat, dialect, num_top=body.num_top)


def _keep(server: ServerContext, context: RequestContext, items: list[Item], response: dict[str, Any]) -> None:
    server.responses.put(context.tenant, response, written(items))


def _resumed(
    server: ServerContext, context: RequestContext, body: InputTokensRequest
) -> tuple[ChatRequest, list[Item]]:
    """The chat that the body stands for, and the items before its own."""
    if body.previous_response_id is None:
        return body.chat, []
    stored = server.responses.get(context.tenant, body.previous_response_id, param="previous_response_id")
    earlier = read(msgspec.json.decode(stored.items))
    return body.chat_after(earlier), earlier


async def input_tokens(request: Request, server: ServerContext) -> Response:
    """How many tokens the prompt of a response would have."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, InputTokensRequest)
    server.check_model(body.model)
    chat, _ = _resumed(server, context, body)
    with renamed(body.renamings):
        check_answerable(chat, server.model.answers)
        with naming("messages"):
            token_ids = await server.render(server.tokenizer.encode_chat, chat.messages, chat)
    return _json(msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(token_ids)}))


async def stored_response(request: Request, server: ServerContext) -> Response:
    tenant = RequestContext.of(request.scope).tenant
    return _json(server.responses.get(tenant, request.path_params["response_id"]).response)


async def delete_response(request: Request, server: ServerContext) -> Response:
    tenant, response_id = RequestContext.of(request.scope).tenant, request.path_params["response_id"]
    server.responses.delete(tenant, response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
