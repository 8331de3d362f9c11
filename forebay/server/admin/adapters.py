"""The routes that load and unload adapters (LoRA), under vLLM's and SGLang's paths."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.base.log import event, get_logger
from forebay.config.adapters import check_name
from forebay.engine.frames import State
from forebay.formats.hub_names import hub_model
from forebay.http.route import Access, Forward, Route
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.administration import LoadAdapterRequest, UnloadAdapterRequest

log = get_logger("server")


class AdapterCard(msgspec.Struct, kw_only=True):
    """An adapter that requests may name."""

    name: str
    path: str
    rank: int
    num_bytes: int
    num_users: int


class AdaptersChanged(msgspec.Struct, kw_only=True):
    """The answer to a load or unload that is complete: the adapters that there are now, by name."""

    success: bool
    loaded_adapters: dict[str, str]
    adapters: list[AdapterCard]


async def load_adapter(request: Request, server: ServerContext) -> Response:
    """Load the adapter of a folder below --lora-root, under a name that requests then give as their model."""
    body = await read_body(request, server, LoadAdapterRequest)
    check_name(body.lora_name, server.model.name)
    path = _below(server.config.lora_root, body.lora_path)
    state = await server.engine.load_adapter(body.lora_name, path, replace=body.load_inplace)
    return _answer(request, "load_adapter", body.lora_name, state)


async def unload_adapter(request: Request, server: ServerContext) -> Response:
    """Unload an adapter: new requests no longer find it, and those that have it end as they would."""
    body = await read_body(request, server, UnloadAdapterRequest)
    state = await server.engine.unload_adapter(body.lora_name, timeout_s=body.timeout)
    return _answer(request, "unload_adapter", body.lora_name, state)


def _answer(request: Request, what: str, name: str, state: State) -> Response:
    log.info(event(what, id=RequestContext.of(request.scope).request_id, name=name, loaded=len(state.adapters)))
    cards = [
        AdapterCard(name=each.name, path=each.path, rank=each.rank, num_bytes=each.num_bytes, num_users=each.num_users)
        for each in state.adapters
    ]
    answer = AdaptersChanged(success=True, loaded_adapters={card.name: card.path for card in cards}, adapters=cards)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _below(root: str | None, lora_path: str) -> str:
    """Return the folder at `lora_path`, which is below the root, as its files are, once links are followed."""
    if root is None:
        raise InvalidRequest("no adapter is read over HTTP: start the server with --lora-root", param="lora_path")
    top = Path(root).resolve()
    try:
        path = (top / lora_path).resolve()
        entries = [path, *path.iterdir()] if path.is_dir() else [path]
        outside = [entry.name for entry in entries if not entry.resolve().is_relative_to(top)]
    except (OSError, ValueError, RuntimeError) as error:  # a circle of links among them
        raise InvalidRequest(f"lora_path {lora_path[:200]!a} cannot be read: {error}", param="lora_path") from None
    if outside:
        raise InvalidRequest(f"lora_path {lora_path[:200]!a} is not below --lora-root", param="lora_path")
    if hub_model(lora_path) is not None and not path.exists():
        raise InvalidRequest(
            f"there is no folder {lora_path[:200]!a} below --lora-root, and nothing is downloaded over HTTP: name an "
            "adapter of the hub in --lora-modules, or put its folder there",
            param="lora_path",
        )
    return str(path)


def _routes(prefix: str) -> tuple[Route[ServerContext], Route[ServerContext]]:
    return (
        Route(
            "POST",
            f"{prefix}/load_lora_adapter",
            load_adapter,
            body=LoadAdapterRequest,
            answer=AdaptersChanged,
            text="Load an adapter (LoRA) from a folder.",
            access=Access.ADMIN,
            forward=Forward.ALL,
        ),
        Route(
            "POST",
            f"{prefix}/unload_lora_adapter",
            unload_adapter,
            body=UnloadAdapterRequest,
            answer=AdaptersChanged,
            text="Unload an adapter (LoRA).",
            access=Access.ADMIN,
            forward=Forward.ALL,
        ),
    )


ROUTES: Final = (*_routes(""), *_routes("/v1"))
