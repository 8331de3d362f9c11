"""The routes of Ollama's clients, except /api/embed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.package import __version__
from forebay.server.answering.generate import serve_chat, serve_completion
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.dialects.llama import settings_of
from forebay.server.dialects.ollama import OllamaChatDialect, OllamaGenerateDialect
from forebay.server.dialects.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from forebay.server.dialects.renaming import renamed
from forebay.server.protocol.requests import CompletionRequest

# Values of `settings_of` that a Modelfile has, too.
_PARAMETERS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


async def ollama_chat(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, OllamaChatRequest)
    server.check_model(body.model_name)
    dialect = OllamaChatDialect(server.tokenizer.table, model=body.model, logprobs=bool(body.logprobs))
    if body.chat is None:
        return Response(dialect.loaded(), media_type="application/json")
    with renamed(body.own_names):
        return await serve_chat(server, context, body.chat, dialect, num_top=body.num_top, cut_to_room=True)


async def ollama_generate(request: Request, server: ServerContext) -> Response:
    context = RequestContext.of(request.scope)
    body = await read_body(request, server, OllamaGenerateRequest)
    server.check_model(body.model_name)
    dialect = OllamaGenerateDialect(server.tokenizer.table, model=body.model, logprobs=bool(body.logprobs))
    if body.asked is None:
        return Response(dialect.loaded(), media_type="application/json")
    with renamed(body.own_names):
        if isinstance(body.asked, CompletionRequest):
            return await serve_completion(server, context, body.asked, dialect, cut_to_room=True)
        return await serve_chat(server, context, body.asked, dialect, num_top=body.num_top, cut_to_room=True)


async def ollama_tags(request: Request, server: ServerContext) -> Response:
    card = {"name": server.model.name, "model": server.model.name, "modified_at": _started(server)}
    size = {"size": server.engine.info.weight_bytes}
    return _json({"models": [{**card, **size, "details": _details(server)}]})


async def ollama_show(request: Request, server: ServerContext) -> Response:
    body = await read_body(request, server, OllamaShowRequest)
    server.check_model(body.model_name)
    info, template, found = server.engine.info, server.tokenizer.chat_template, server.model.answers.formats
    values = settings_of(server.sampling)
    capabilities = {
        "completion": True,
        "tools": found.calls is not None,
        "thinking": found.thinking is not None,
        "embedding": server.model.texts.embedding.is_embedder,
    }
    return _json(
        {
            "modified_at": _started(server),
            "template": "" if template is None else template.source,
            "parameters": "\n".join(f"{name} {values[name]}" for name in _PARAMETERS),
            "details": _details(server),
            "model_info": {
                "general.architecture": info.model_type,
                f"{info.model_type}.context_length": info.context_length,
                f"{info.model_type}.embedding_length": info.hidden_size,
                f"{info.model_type}.vocab_size": info.vocab_size,
            },
            "capabilities": [name for name, has in capabilities.items() if has],
        }
    )


async def ollama_version(request: Request, server: ServerContext) -> Response:
    """Forebay's own version: the routes are Ollama's, the number is not."""
    return _json({"version": __version__})


def _details(server: ServerContext) -> dict[str, Any]:
    family = server.engine.info.model_type
    form = "gguf" if server.model.path.endswith(".gguf") else "safetensors"
    return {"format": form, "family": family, "families": [family]}


def _started(server: ServerContext) -> str:
    return datetime.fromtimestamp(server.model.created, UTC).isoformat().replace("+00:00", "Z")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
