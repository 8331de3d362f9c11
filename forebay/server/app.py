"""The application: routes behind the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import Any, Final, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forebay.base.errors import ForebayError
from forebay.config.config import ServerConfig
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.async_engine import AsyncEngine
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.end_tokens import EndTokens
from forebay.requests.sampling_params import SamplingParams
from forebay.server.admin import adapters, information, occupation, slots, tree
from forebay.server.admin.aborting import AbortRequest, abort_request
from forebay.server.admin.metrics import Metrics
from forebay.server.api import (
    chat,
    completions,
    embeddings,
    generate,
    llama,
    messages,
    ollama,
    ollama_models,
    responses,
    tokens,
)
from forebay.server.api.embeddings_request import EmbeddingRequest, RerankRequest, ScoreRequest
from forebay.server.api.generate import NativeRequest
from forebay.server.api.llama_request import LlamaCompletionRequest
from forebay.server.api.messages_request import CountTokensRequest, MessagesRequest
from forebay.server.api.ollama_request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from forebay.server.api.response_store import ResponseStore
from forebay.server.api.responses_request import InputTokensRequest, ResponsesRequest
from forebay.server.assets import file_endpoint, pass_on, with_cors
from forebay.server.console import HEADERS, Asset, load_assets
from forebay.server.context import RequestContext, ServerContext
from forebay.server.gateway import Gateway
from forebay.server.grammars import GrammarWorkers
from forebay.server.http.bodies import Bodies
from forebay.server.http.errors import MESSAGES, RESPONSES
from forebay.server.http.lifecycle import Lifecycle
from forebay.server.http.preparation import Preparation, staying_client
from forebay.server.http.security import Cluster, Isolation, Security
from forebay.server.http.workers import TextWorkers, Workers
from forebay.server.images.reader import ImageReader
from forebay.server.openapi.document import document
from forebay.server.openapi.page import html
from forebay.server.protocol.administration import (
    CheckTransfersRequest,
    LoadAdapterRequest,
    PauseRequest,
    ReleaseRequest,
    ResumeRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from forebay.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from forebay.server.protocol.strict import Strict
from forebay.server.served_model import ServedModel
from forebay.text.tokenizer import Tokenizer


class Handler(Protocol):
    """A route's function."""

    __name__: str

    def __call__(self, request: Request, server: ServerContext) -> Awaitable[Response]: ...


DOCS: Final = "/docs"
OPENAPI: Final = "/openapi.json"

ROUTES: Final[tuple[tuple[str, str, Handler, type[Strict] | None], ...]] = (
    ("POST", "/v1/chat/completions", chat.chat_completions, ChatRequest),
    ("POST", "/v1/completions", completions.completions, CompletionRequest),
    ("POST", "/generate", generate.native, NativeRequest),
    ("POST", "/completion", llama.llama_completion, LlamaCompletionRequest),
    ("POST", "/apply-template", llama.apply_template, ChatRequest),
    ("POST", "/api/chat", ollama.ollama_chat, OllamaChatRequest),
    ("POST", "/api/generate", ollama.ollama_generate, OllamaGenerateRequest),
    ("POST", "/api/embed", embeddings.ollama_embed, OllamaEmbedRequest),
    ("POST", "/api/embeddings", embeddings.ollama_embeddings, OllamaEmbeddingsRequest),
    ("POST", "/api/show", ollama_models.ollama_show, OllamaShowRequest),
    ("POST", "/api/pull", ollama_models.ollama_pull, OllamaPullRequest),
    ("GET", "/api/tags", ollama_models.ollama_tags, None),
    ("GET", "/api/ps", ollama_models.ollama_ps, None),
    ("GET", "/api/version", ollama_models.ollama_version, None),
    ("POST", "/abort_request", abort_request, AbortRequest),
    ("POST", MESSAGES, messages.messages, MessagesRequest),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens, CountTokensRequest),
    ("POST", RESPONSES, responses.responses, ResponsesRequest),
    ("POST", f"{RESPONSES}/input_tokens", responses.input_tokens, InputTokensRequest),
    ("GET", f"{RESPONSES}/{{response_id}}", responses.stored_response, None),
    ("DELETE", f"{RESPONSES}/{{response_id}}", responses.delete_response, None),
    ("POST", "/v1/embeddings", embeddings.embeddings, EmbeddingRequest),
    ("POST", "/v1/score", embeddings.score, ScoreRequest),
    ("POST", "/v1/rerank", embeddings.rerank, RerankRequest),
    ("GET", "/v1/models", information.models, None),
    ("GET", "/v1/models/{model_id:path}", information.model, None),
    ("POST", "/tokenize", tokens.tokenize, TokenizeRequest),
    ("GET", "/tokenizer_info", tokens.tokenizer_info, None),
    ("POST", "/detokenize", tokens.detokenize, DetokenizeRequest),
    ("GET", "/health", information.health, None),
    ("GET", "/ready", information.ready, None),
    ("GET", "/metrics", information.metrics, None),
    ("GET", "/server_info", information.server_info, None),
    ("GET", "/model_info", information.model_info, None),
    ("GET", "/props", slots.props, None),
    ("GET", "/slots", slots.slots, None),
    ("GET", "/debug/state", information.debug_state, None),
    ("POST", "/debug/tree", tree.debug_tree, tree.TreeRequest),
    ("POST", "/flush_cache", information.flush_cache, None),
    ("POST", "/release_memory_occupation", occupation.release, ReleaseRequest),
    ("POST", "/resume_memory_occupation", occupation.resume, ResumeRequest),
    ("POST", "/pause_generation", occupation.pause, PauseRequest),
    ("POST", "/continue_generation", occupation.go_on, None),
    ("POST", "/sleep", occupation.sleep, None),
    ("POST", "/wake_up", occupation.wake_up, None),
    ("GET", "/is_sleeping", occupation.is_sleeping, None),
    ("POST", "/check_transfers", information.check_transfers, CheckTransfersRequest),
    *(
        ("POST", f"{prefix}/{name}_lora_adapter", handler, body)
        for prefix in ("", "/v1")
        for name, handler, body in (
            ("load", adapters.load_adapter, LoadAdapterRequest),
            ("unload", adapters.unload_adapter, UnloadAdapterRequest),
        )
    ),
    ("POST", "/update_weights_from_disk", occupation.update_weights_from_disk, UpdateWeightsRequest),
)


def create_context(
    config: ServerConfig, model: ServedModel, engine: AsyncEngine, tokenizer: Tokenizer
) -> ServerContext:
    """Raises ConfigError for a server that anybody on the network could use, ModelError for impossible defaults."""

    preparation, lenient = Preparation(config.tenants), config.unknown_fields == "warn"
    json_workers, has_images = Workers(preparation.lane("JSON", 1)), model.tiling is not None
    return ServerContext(
        config=config,
        model=model,
        engine=engine,
        tokenizer=tokenizer,
        security=Security(config),
        cluster=Cluster(config),
        isolation=Isolation(config.cache_isolation),
        lifecycle=Lifecycle(lambda: engine.info.max_requests, config.tenants),
        metrics=Metrics(model.name, config.metrics_compat),
        bodies=Bodies(config.max_body_bytes, json_workers, config.tenants, lenient=lenient, images=has_images),
        json_workers=json_workers,
        workers=TextWorkers(preparation),
        grammars=GrammarWorkers(
            preparation,
            lambda: Vocabulary.of(
                tokenizer.table,
                EndTokens((*engine.info.eos_token_ids, *model.end_tokens), vocab_size=engine.info.vocab_size).ids,
                engine.info.vocab_size,
            ),
        ),
        responses=ResponseStore(config.responses_store_bytes if model.mode is DisaggregationMode.NULL else 0),
        sampling=SamplingParams.defaults(config.sampling.values, config.sampling.source),
        started_at=time.time(),
        images=None if model.tiling is None else ImageReader(model.tiling, tokenizer, config, preparation, model.mode),
        client=staying_client(),
    )


def create_app(server: ServerContext) -> ASGIApp:
    """The ASGI application; run it with `http.protocol.protocol_class`, which holds the limits below ASGI."""
    assets = load_assets()
    routes, paths = create_routes(server, assets), [path for _, path, _, _ in ROUTES]
    public = (*assets, DOCS, OPENAPI)  # which hold nothing of the operator's
    gateway = Gateway(routes, server.security, server.cluster, server.metrics, paths=paths, public_paths=public)
    return with_cors(gateway, server.config)


def create_routes(server: ServerContext, assets: dict[str, Asset]) -> Starlette:
    """The routes alone."""
    routes = [Route(path, _endpoint(handler, server), methods=[method]) for method, path, handler, _ in ROUTES]
    routes += [Route(path, file_endpoint(asset)) for path, asset in assets.items()]
    routes += [Route(OPENAPI, _openapi), Route(DOCS, _docs)]
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((ForebayError, 404, 405, Exception), pass_on))
    app.router.redirect_slashes = False
    return app


def _endpoint(
    handler: Callable[..., Awaitable[Response]], server: ServerContext
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, server=replace(server, client=RequestContext.of(request.scope).client))

    return endpoint


async def _openapi(request: Request) -> Response:
    return Response(await asyncio.to_thread(_document), media_type="application/json")


async def _docs(request: Request) -> Response:
    return Response(await asyncio.to_thread(_reference), media_type="text/html", headers=HEADERS)


def described() -> dict[str, Any]:
    """The OpenAPI document, which takes a quarter of a second to make."""
    return document([(method, path, handler.__name__, body) for method, path, handler, body in ROUTES])


@cache
def _document() -> bytes:
    return msgspec.json.encode(described())


@cache
def _reference() -> str:
    return html(described())
