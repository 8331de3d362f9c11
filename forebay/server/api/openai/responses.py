"""/v1/responses: OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from forebay.http.answers import json_response
from forebay.http.errors import RESPONSES
from forebay.http.preparation import Client
from forebay.http.route import EVENTS, Access, Forward, Route
from forebay.server.api.core.images import chat_ids
from forebay.server.api.core.prompts import check_answerable, naming
from forebay.server.api.core.renaming import renamed
from forebay.server.api.core.serving import serve_chat
from forebay.server.api.openai.compaction import (
    CompactionDialect,
    compacted_beyond,
    conversation,
    expanded,
    for_summary,
    is_triggered,
    sealing,
)
from forebay.server.api.openai.responses_dialect import ModelResponse, ResponsesDialect, response_of
from forebay.server.api.openai.responses_items import Item, written
from forebay.server.api.openai.responses_request import InputTokensRequest, ResponsesRequest
from forebay.server.api.openai.truncation import truncated
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import ChatRequest


class ResponseInputTokens(TypedDict):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


async def responses(request: Request, server: ServerContext) -> Response:
    """Answer a request of OpenAI's Responses API, whole, as a stream of events or in the background. If the server
    stores responses, it stores this one unless `store` is false."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, ResponsesRequest)
    server.check_model(context, body.model)
    if body.store or body.background:
        server.responses.check_is_on("store" if body.store else "background")
    stores = server.responses.is_on and body.store is not False
    chat, items = conversation(server, context, body)
    own = {"object": "response", "created_at": int(time.time()), "model": context.model}
    fields = {"id": f"resp_{context.request_id}", **own, **body.echo(stored=stores)}
    keep = partial(_keep, server, context, written(items)) if stores else None  # as long as they have their images
    answer = partial(_answer, body=body, chat=chat, items=items, fields=fields, keep=keep)
    if not body.background or keep is None:
        return await answer(server, context)

    def ended(status: str, error: dict[str, Any] | None) -> None:
        keep(response_of(fields, status, error=error))

    begun = response_of(fields, "in_progress")
    with server.lifecycle.admit(context.tenant.name, 1):
        pass  # what admission would refuse is refused now

    def run(client: Client) -> Awaitable[Response]:
        return answer(replace(server, client=client), replace(context, client=client, headers=[]))

    server.background.start(context.tenant, fields["id"], run, context.arrived_at, ended)
    keep(begun)  # the task has not run yet
    return json_response(begun)


async def _answer(
    server: ServerContext,
    context: RequestContext,
    *,
    body: ResponsesRequest,
    chat: ChatRequest,
    items: Sequence[Item],
    fields: dict[str, Any],
    keep: Callable[[dict[str, Any]], None] | None,
) -> Response:
    if is_triggered(body.items):
        summing = CompactionDialect(fields=fields, seal=sealing(server.seals, context.tenant), keep=keep)
        with renamed(body.renamings):
            return await serve_chat(server, context, for_summary(chat), summing, cut_to_room=True)
    with renamed(body.renamings):
        chat, first = await compacted_beyond(server, context, body, chat, items)
        if not first:
            chat = await truncated(server, context, body, chat, expanded(server.seals, context.tenant, items))
    dialect = ResponsesDialect(
        fields=fields,
        first=first,
        seals=body.wants_sealed,
        table=server.tokenizer.table if body.num_top >= 0 else None,
        tools={tool.name: tool for tool in body.own_tools(items)},
        keep=keep,
    )
    with renamed(body.renamings):
        cut = body.truncation == "auto"
        return await serve_chat(server, context, chat, dialect, num_top=body.num_top, cut_to_room=cut)


def _keep(
    server: ServerContext, context: RequestContext, items: list[dict[str, Any]], response: dict[str, Any]
) -> None:
    server.responses.put(context.tenant, response, items)


async def input_tokens(request: Request, server: ServerContext) -> Response:
    """Return how many tokens the prompt of a response would have."""
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, InputTokensRequest)
    server.check_model(context, body.model)
    chat, items = conversation(server, context, body)
    with renamed(body.renamings):
        chat = await truncated(server, context, body, chat, expanded(server.seals, context.tenant, items))
        check_answerable(chat, server.model.answers)
        with naming("messages"):
            token_ids = await chat_ids(server, context, chat.messages, chat)
    return json_response(ResponseInputTokens(object="response.input_tokens", input_tokens=len(token_ids)))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        RESPONSES,
        responses,
        body=ResponsesRequest,
        answer=ModelResponse,
        stream=EVENTS,
        text="Answer a conversation, in the form of OpenAI's responses.",
        access=Access.USER,
        forward=Forward.PAIR,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        input_tokens,
        body=InputTokensRequest,
        answer=ResponseInputTokens,
        text="How many tokens the prompt of a response would have.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
