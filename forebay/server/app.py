"""The application: routes behind the gateway."""

from __future__ import annotations

import asyncio
import hmac
import time
from functools import cache
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp

from forebay.config.config import ServerConfig
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.async_engine import AsyncEngine
from forebay.formats.prefix_files import usable_secret
from forebay.grammar.vocabulary import Vocabulary
from forebay.http.bodies import Bodies
from forebay.http.exporting import make_tracer
from forebay.http.lifecycle import Lifecycle
from forebay.http.preparation import Preparation, staying_client
from forebay.http.route import Route
from forebay.http.security import AccessRules, Cluster, Isolation, Security
from forebay.http.tracing import traced
from forebay.http.workers import TextWorkers, Workers
from forebay.requests.end_tokens import EndTokens
from forebay.requests.sampling_params import SamplingParams
from forebay.server.admin import (
    aborting,
    adapters,
    explain,
    health,
    information,
    models,
    occupation,
    recorder,
    slots,
    state,
    transfers,
    tree,
    weights,
    what_if,
)
from forebay.server.admin.metrics import Metrics
from forebay.server.api import tokens
from forebay.server.api.anthropic import messages
from forebay.server.api.llama import completion as llama_completion
from forebay.server.api.ollama import chat as ollama_chat
from forebay.server.api.ollama import embeddings as ollama_embeddings
from forebay.server.api.ollama import models as ollama_models
from forebay.server.api.openai import chat, classify, compaction, completions, embeddings, responses, stored_responses
from forebay.server.api.openai.response_store import ResponseStore
from forebay.server.api.openai.seals import Seals
from forebay.server.api.sglang import generate
from forebay.server.assets import application, file_endpoint, with_cors
from forebay.server.console import HEADERS, Asset, load_assets
from forebay.server.context import ServerContext
from forebay.server.gateway import Gateway
from forebay.server.grammars import GrammarWorkers
from forebay.server.images.reader import ImageReader
from forebay.server.openapi.document import document
from forebay.server.openapi.page import html
from forebay.server.served_model import ServedModel
from forebay.text.tokenizer import Tokenizer

DOCS: Final = "/docs"
OPENAPI: Final = "/openapi.json"

ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *generate.ROUTES,
    *llama_completion.ROUTES,
    *ollama_chat.ROUTES,
    *ollama_embeddings.ROUTES,
    *ollama_models.ROUTES,
    *aborting.ROUTES,
    *messages.ROUTES,
    *responses.ROUTES,
    *compaction.ROUTES,
    *stored_responses.ROUTES,
    *embeddings.ROUTES,
    *classify.ROUTES,
    *models.ROUTES,
    *tokens.ROUTES,
    *health.ROUTES,
    *information.ROUTES,
    *slots.ROUTES,
    *state.ROUTES,
    *tree.ROUTES,
    *explain.ROUTES,
    *what_if.ROUTES,
    *occupation.ROUTES,
    *transfers.ROUTES,
    *adapters.ROUTES,
    *weights.ROUTES,
    *recorder.ROUTES,
)


def create_context(
    config: ServerConfig, model: ServedModel, engine: AsyncEngine, tokenizer: Tokenizer
) -> ServerContext:
    """Return the server's context. Raises ConfigError for a server that is open to the network without a key,
    ModelError for impossible defaults."""

    preparation, lenient = Preparation(config.tenants), config.unknown_fields == "warn"
    metrics = Metrics(model.name, config.metrics_compat)
    json_workers, has_images = Workers(preparation.lane("JSON", 1)), model.tiling is not None
    return ServerContext(
        config=config,
        model=model,
        engine=engine,
        tokenizer=tokenizer,
        security=Security(config),
        cluster=Cluster(config),
        isolation=Isolation(config.cache_isolation, _namespace_secret(config)),
        lifecycle=Lifecycle(lambda: engine.info.max_requests, config.tenants),
        metrics=metrics,
        tracer=make_tracer(config, "forebay", metrics.count_spans_dropped),
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
        images=None if model.tiling is None else ImageReader(model.tiling, tokenizer, config, preparation),
        client=staying_client(),
        seals=Seals(config.cluster_key),
    )


def _namespace_secret(config: ServerConfig) -> bytes | None:
    """Return the secret of the names of namespaces: with events of the prefix cache the cluster's, so that all servers
    give one prefix the same hashes; else that of the cache's files; None for one of this process."""
    if config.kv_events and config.cluster_key:
        return hmac.digest(config.cluster_key, b"names of namespaces", "sha256")
    return usable_secret(config.prefix_cache_dir)


def create_app(server: ServerContext) -> ASGIApp:
    """The ASGI application; run it with `http.protocol.protocol_class`, which holds the limits below ASGI."""
    assets = load_assets()
    access = AccessRules(ROUTES, files=(*assets, DOCS, OPENAPI))
    gateway = Gateway(create_routes(server, assets), server.security, server.cluster, server.metrics, access)
    return with_cors(traced(gateway, server.tracer), server.config)


def create_routes(server: ServerContext, assets: dict[str, Asset]) -> Starlette:
    """The routes alone. Each request has the server's context with a client of its own."""
    files = [Path(path, file_endpoint(asset)) for path, asset in assets.items()]
    return application(ROUTES, server.endpoint, [*files, Path(OPENAPI, _openapi), Path(DOCS, _docs)])


async def _openapi(request: Request) -> Response:
    return Response(await asyncio.to_thread(_document), media_type="application/json")


async def _docs(request: Request) -> Response:
    return Response(await asyncio.to_thread(_reference), media_type="text/html", headers=HEADERS)


def described() -> dict[str, Any]:
    """The OpenAPI document, which takes a quarter of a second to make."""
    return document(ROUTES)


@cache
def _document() -> bytes:
    return msgspec.json.encode(described())


@cache
def _reference() -> str:
    return html(described())
