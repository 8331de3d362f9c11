"""Ollama's routes that say which models there are, and what they can do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal, NotRequired, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import NotFound
from forebay.base.package import __version__
from forebay.base.sampling import NUMBERS
from forebay.http.answers import json_response
from forebay.http.route import LINES, Access, Forward, Route
from forebay.server.api.llama.completion import settings_of
from forebay.server.api.ollama.chat import OllamaDialect
from forebay.server.api.ollama.request import OllamaPullRequest, OllamaShowRequest
from forebay.server.context import RequestContext, ServerContext, read_body


class OllamaDetails(TypedDict):
    """The format and the family of a model; of an adapter, the model that it is added to."""

    parent_model: NotRequired[str]
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]


class OllamaModel(TypedDict):
    """A model or an adapter in the list of /api/tags; `size` is the bytes of its weights, of a model in memory."""

    name: str
    model: str
    modified_at: str
    size: int
    details: OllamaDetails


class OllamaTags(TypedDict):
    """The answer of /api/tags: the one model that is served, and its adapters."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model or an adapter in memory. It stays there; `size_vram` is the part of `size` on a GPU."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(TypedDict):
    """The answer of /api/ps."""

    models: list[OllamaRunningModel]


class OllamaPulled(TypedDict):
    """The answer of /api/pull; of a stream, one line."""

    status: str


class OllamaShown(TypedDict):
    """The answer of /api/show."""

    modified_at: str
    template: str
    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "vision", "embedding"]]


class OllamaVersion(TypedDict):
    """The answer of /api/version."""

    version: str


_NEVER: Final = "9999-12-31T23:59:59Z"  # a model stays in memory until the server ends
# Values of `settings_of` that a Modelfile has, too.
_PARAMETERS: Final = [number.llama_name for number in NUMBERS.values()]


async def ollama_tags(request: Request, server: ServerContext) -> Response:
    """List the model that is served, and its adapters."""
    return json_response(OllamaTags(models=_cards(server)))


async def ollama_ps(request: Request, server: ServerContext) -> Response:
    """List the loaded models: the served model and its adapters."""
    info = server.engine.info
    on_gpu = any(item == "device" and value != "cpu" for _, item, value, _ in info.report)
    running = [
        OllamaRunningModel(
            **card,
            expires_at=_NEVER,
            size_vram=card["size"] if on_gpu else 0,
            context_length=info.context_length,
        )
        for card in _cards(server)
    ]
    return json_response(OllamaRunningModels(models=running))


async def ollama_pull(request: Request, server: ServerContext) -> Response:
    """Answer that a model which is served is there. Others are not loaded: the operator chooses."""
    body = await read_body(request, server, OllamaPullRequest)
    try:
        server.check_model(RequestContext.of(request.scope), body.model_name)
    except NotFound as error:
        error.message += ": the operator loads another one (forebay models pull, forebay serve)"
        raise
    if body.stream is False:
        return json_response(OllamaPulled(status="success"))
    lines = [msgspec.json.encode(OllamaPulled(status=status)) + b"\n" for status in ("pulling manifest", "success")]
    return Response(b"".join(lines), media_type=OllamaDialect.media_type)


def _cards(server: ServerContext) -> list[OllamaModel]:
    adapters = server.engine.adapters.values()
    sizes = {server.model.name: server.engine.info.weight_bytes, **{each.name: each.num_bytes for each in adapters}}
    started = _started(server)
    return [
        OllamaModel(name=name, model=name, modified_at=started, size=size, details=_details(server, name))
        for name, size in sizes.items()
    ]


async def ollama_show(request: Request, server: ServerContext) -> Response:
    """Describe the model, or an adapter of it: template, sampling values and capabilities."""
    body = await read_body(request, server, OllamaShowRequest)
    context = RequestContext.of(request.scope)
    server.check_model(context, body.model_name)
    info, template, found = server.engine.info, server.tokenizer.chat_template, server.model.answers.formats
    values = settings_of(server.sampling)
    capabilities = {
        "completion": True,
        "tools": found.calls is not None,
        "thinking": found.thinking is not None,
        "vision": server.images is not None,
        "embedding": server.model.texts.embedding.is_embedder,
    }
    return json_response(
        {
            "modified_at": _started(server),
            "template": "" if template is None else template.source,
            "parameters": "\n".join(f"{name} {values[name]}" for name in _PARAMETERS),
            "details": _details(server, context.model),
            "model_info": {
                "general.architecture": info.model_type,
                f"{info.model_type}.context_length": info.context_length,
                f"{info.model_type}.embedding_length": info.vector_size,
                f"{info.model_type}.vocab_size": info.vocab_size,
            },
            "capabilities": [name for name, has in capabilities.items() if has],
        }
    )


async def ollama_version(request: Request, server: ServerContext) -> Response:
    """Forebay's own version: the routes are Ollama's, the number is not."""
    return json_response(OllamaVersion(version=__version__))


def _details(server: ServerContext, name: str) -> OllamaDetails:
    """Return the details of the model or adapter of that name."""
    family = server.engine.info.model_type
    is_gguf = server.model.path.endswith(".gguf")
    details: OllamaDetails = {
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
    }
    if name != server.model.name:
        details |= {"parent_model": server.model.name, "format": "safetensors"}
    return details


def _started(server: ServerContext) -> str:
    return datetime.fromtimestamp(server.model.created, UTC).isoformat().replace("+00:00", "Z")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/api/show",
        ollama_show,
        body=OllamaShowRequest,
        answer=OllamaShown,
        text="Template, limits and abilities of the model or an adapter, as Ollama's clients ask for them.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
    Route(
        "POST",
        "/api/pull",
        ollama_pull,
        body=OllamaPullRequest,
        answer=OllamaPulled,
        stream=LINES,
        text="Whether a model is there; no other one is loaded.",
        access=Access.USER,
        forward=Forward.NONE,
    ),
    Route(
        "GET",
        "/api/tags",
        ollama_tags,
        answer=OllamaTags,
        text="The one model that is served and its adapters, as Ollama's clients ask for them.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
    Route(
        "GET",
        "/api/ps",
        ollama_ps,
        answer=OllamaRunningModels,
        text="What is in memory, the model and its adapters, as Ollama's clients ask for it.",
        access=Access.USER,
        forward=Forward.NONE,
    ),
    Route(
        "GET",
        "/api/version",
        ollama_version,
        answer=OllamaVersion,
        text="Forebay's version, as Ollama's clients ask for it.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
