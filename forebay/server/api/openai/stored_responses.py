"""Responses that the server has stored: /v1/responses/{response_id}."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from forebay.http.answers import json_response
from forebay.http.errors import RESPONSES
from forebay.http.route import JSON, Access, Forward, Route
from forebay.server.api.openai.responses import ModelResponse
from forebay.server.context import RequestContext, ServerContext

_PATH: Final = f"{RESPONSES}/{{response_id}}"
_TEXT: Final = "A stored response of one's own, to read (GET) or to drop (DELETE)."


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


async def delete_response(request: Request, server: ServerContext) -> Response:
    """Delete a stored response of the caller's API key; an unknown id is answered with 404."""
    tenant, response_id = RequestContext.of(request.scope).tenant, request.path_params["response_id"]
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
        "DELETE",
        _PATH,
        delete_response,
        answer=DeletedResponse,
        text=_TEXT,
        access=Access.USER,
        forward=Forward.OWN,
    ),
)
