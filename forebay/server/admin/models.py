"""The models that are served: /v1/models."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.engine.frames import LoadedAdapter
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.context import RequestContext, ServerContext


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


def _card(server: ServerContext, adapter: LoadedAdapter | None = None) -> ModelCard:
    """Return the card of an adapter, without one that of the model."""
    info = server.loaded_info
    return ModelCard(
        id=server.model.name if adapter is None else adapter.name,
        object="model",
        created=server.model.created,
        owned_by="forebay",
        max_model_len=info.context_length if info is not None else None,
        root=UNSET if adapter is None else adapter.path,
        parent=UNSET if adapter is None else server.model.name,
    )


async def models(request: Request, server: ServerContext) -> Response:
    """List the model and its adapters."""
    found = server.engine.adapters.values() if server.loaded_info is not None else ()
    return json_response(ModelList(object="list", data=[_card(server), *(_card(server, adapter) for adapter in found)]))


async def model(request: Request, server: ServerContext) -> Response:
    """Describe the model of this name; another name is answered with 404."""
    context = RequestContext.of(request.scope)
    server.check_model(context, request.path_params["model_id"])
    return json_response(_card(server, server.engine.adapters[context.adapter] if context.adapter else None))


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/v1/models",
        models,
        answer=ModelList,
        text="The one model that is served.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        "/v1/models/{model_id:path}",
        model,
        answer=ModelCard,
        text="The model of that name; 404 for any other.",
        access=Access.USER,
        forward=Forward.OWN,
    ),
)
