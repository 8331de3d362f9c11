"""Responses that the server has stored: /v1/responses/{response_id}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.http.answers import json_response
from forebay.http.errors import RESPONSES
from forebay.http.route import JSON, Access, Forward, Route
from forebay.server.api.openai.responses_dialect import ModelResponse
from forebay.server.context import RequestContext, ServerContext

_PATH: Final = f"{RESPONSES}/{{response_id}}"
_TEXT: Final = "A stored response of one's own, to read (GET) or to drop (DELETE)."


MAX_PAGE: Final = 100  # items


class InputItems(TypedDict):
    """A page of the items that led to a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    """The answer to the deletion of a stored response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


async def stored_response(request: Request, server: ServerContext) -> Response:
    """Return a stored response of the caller's API key; an unknown id is answered with 404."""
    tenant = RequestContext.of(request.scope).tenant
    stored = server.responses.get(tenant, request.path_params["response_id"])
    return Response(stored.response, media_type=JSON)


async def cancel_response(request: Request, server: ServerContext) -> Response:
    """End a response of the caller's API key that is made in the background, and return it. One that has ended is
    returned as it is; an unknown id is answered with 404."""
    tenant, response_id = RequestContext.of(request.scope).tenant, request.path_params["response_id"]
    stored = server.responses.get(tenant, response_id)
    if not msgspec.json.decode(stored.response).get("background"):
        what = "this response was not made in the background, and has ended: only others can be cancelled"
        raise InvalidRequest(what, code="not_in_background", param="response_id")
    if await server.background.cancel(tenant, response_id):
        stored = server.responses.get(tenant, response_id)
    return Response(stored.response, media_type=JSON)


async def input_items(request: Request, server: ServerContext) -> Response:
    """Return the items that led to a stored response of the caller's API key, the last one first unless `order` is
    `asc`. An unknown id is answered with 404."""
    tenant, response_id = RequestContext.of(request.scope).tenant, request.path_params["response_id"]
    stored = server.responses.get(tenant, response_id)
    num_own = len(msgspec.json.decode(stored.response)["output"])
    items = msgspec.json.decode(stored.items)
    items = [{"id": f"item_{place}", **item} for place, item in enumerate(items[: len(items) - num_own])]
    return json_response(_page(items, request.query_params))


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> InputItems:
    """Return the items behind the one that `after` names, as many as `limit` says."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MAX_PAGE):
        raise InvalidRequest(f"limit is {limit[:20]!a}: give a number from 1 to {MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:20]!a}: give asc or desc", param="order")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after names no item of this response: {after[:64]!a}", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = ordered[begin : begin + int(limit)]
    return InputItems(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=begin + len(page) < len(ordered),
    )


async def delete_response(request: Request, server: ServerContext) -> Response:
    """Delete a stored response of the caller's API key; an unknown id is answered with 404."""
    tenant, response_id = RequestContext.of(request.scope).tenant, request.path_params["response_id"]
    await server.background.cancel(tenant, response_id)
    server.responses.delete(tenant, response_id)
    return json_response(DeletedResponse(id=response_id, object="response", deleted=True))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        _PATH,
        stored_response,
        answer=ModelResponse,
        text=_TEXT,
        access=Access.USER,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        f"{_PATH}/input_items",
        input_items,
        answer=InputItems,
        text="The items that led to a stored response: `limit`, `order` and `after` choose a page.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
    Route(
        "POST",
        f"{_PATH}/cancel",
        cancel_response,
        answer=ModelResponse,
        text="End a response that is made in the background.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
    Route(
        "DELETE",
        _PATH,
        delete_response,
        answer=DeletedResponse,
        text=_TEXT,
        access=Access.USER,
        forward=Forward.OWN,
    ),
)
