"""Ollama's routes that embed texts: /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.http.route import Access, Forward, Route
from forebay.server.api.core.pooled import INLINE_NUMBERS, embedded
from forebay.server.api.core.renaming import renamed
from forebay.server.api.ollama.request import OllamaEmbeddingsRequest, OllamaEmbedRequest
from forebay.server.context import RequestContext, ServerContext, read_body


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The answer of /api/embed; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """The answer of /api/embeddings."""

    embedding: list[float]


async def ollama_embed(request: Request, server: ServerContext) -> Response:
    """Answer with embeddings in Ollama's form."""
    body = await read_body(request, server, OllamaEmbedRequest)
    server.check_model(RequestContext.of(request.scope), body.model_name)
    made, usage = await embedded(request, server, body.embedding)
    taken_s = time.monotonic() - RequestContext.of(request.scope).arrived_at

    def answer() -> bytes:
        return msgspec.json.encode(
            OllamaEmbeddings(
                model=body.model,
                embeddings=[each.tolist() for each in made],
                total_duration=round(taken_s * 1e9),
                load_duration=0,
                prompt_eval_count=usage.prompt_tokens,
            )
        )

    large = sum(map(len, made)) > INLINE_NUMBERS
    return _json(await server.json_workers.run(server.client, answer) if large else answer())


async def ollama_embeddings(request: Request, server: ServerContext) -> Response:
    """Answer Ollama's older route with the embedding of one prompt."""
    body = await read_body(request, server, OllamaEmbeddingsRequest)
    server.check_model(RequestContext.of(request.scope), body.model_name)
    with renamed({"input": "prompt"}):
        ((vector,), _) = await embedded(request, server, body.embedding)
    return _json(msgspec.json.encode(OllamaEmbedding(embedding=vector.tolist())))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/api/embed",
        ollama_embed,
        body=OllamaEmbedRequest,
        answer=OllamaEmbeddings,
        text="The vectors of texts, in Ollama's form.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama_embeddings,
        body=OllamaEmbeddingsRequest,
        answer=OllamaEmbedding,
        text="The vector of one text, in Ollama's older form.",
        access=Access.USER,
        forward=Forward.NONE,
    ),
)
