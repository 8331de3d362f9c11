"""/openapi.json: the bodies that are taken, from the types that take them, and the answers."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from pydantic.json_schema import models_json_schema

from forebay.base.package import __version__
from forebay.server.admin import adapters, information, occupation, slots
from forebay.server.admin.aborting import Aborted
from forebay.server.admin.tree import TreeRows
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
from forebay.server.http import errors
from forebay.server.http.errors import LLAMA_SERVER, MESSAGES, OLLAMA, RESPONSES, speaks_anthropic
from forebay.server.http.security import ADAPTER_PATHS, ADMIN_PATHS
from forebay.server.openapi.descriptions import ROUTES, describe
from forebay.server.protocol.strict import Strict

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
_REF: Final = "#/components/schemas/{}"
_STATUS_ROUTES: Final = ("/health", "/ready", "/debug/state")  # whose 503 is an answer, not an error

_PARAMETER: Final = re.compile(r"\{(\w+)")
_CHUNKS: Final = {"description": "A stream of events or of lines, each of them JSON."}

# By path, or method and path, what a 200 may be: media type to type.
_ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {JSON: chat.ChatCompletion, EVENTS: Any},
    "/v1/completions": {JSON: completions.Completion, EVENTS: Any},
    "/generate": {JSON: generate.Generated | list[generate.Generated], EVENTS: Any},
    MESSAGES: {JSON: messages.AnthropicMessage, EVENTS: Any},
    f"{MESSAGES}/count_tokens": {JSON: messages.TokenCount},
    RESPONSES: {JSON: responses.ModelResponse, EVENTS: Any},
    f"{RESPONSES}/input_tokens": {JSON: responses.ResponseInputTokens},
    f"{RESPONSES}/{{response_id}}": {JSON: responses.ModelResponse},
    f"DELETE {RESPONSES}/{{response_id}}": {JSON: responses.DeletedResponse},
    "/completion": {JSON: llama.LlamaCompletion | list[llama.LlamaCompletion], EVENTS: Any},
    "/apply-template": {JSON: llama.TemplateText},
    "/props": {JSON: slots.Props},
    "/slots": {JSON: list[slots.Slot]},
    "/api/chat": {JSON: ollama.OllamaChat, LINES: Any},
    "/api/generate": {JSON: ollama.OllamaGenerated, LINES: Any},
    "/api/embed": {JSON: embeddings.OllamaEmbeddings},
    "/api/embeddings": {JSON: embeddings.OllamaEmbedding},
    "/api/show": {JSON: ollama_models.OllamaShown},
    "/api/pull": {JSON: ollama_models.OllamaPulled, LINES: Any},
    "/api/tags": {JSON: ollama_models.OllamaTags},
    "/api/ps": {JSON: ollama_models.OllamaRunningModels},
    "/api/version": {JSON: ollama_models.OllamaVersion},
    "/abort_request": {JSON: Aborted},
    "/v1/embeddings": {JSON: embeddings.Embeddings},
    "/v1/score": {JSON: embeddings.Scores},
    "/v1/rerank": {JSON: embeddings.Reranked | list[embeddings.ScoredText]},
    "/v1/models": {JSON: information.ModelList},
    "/v1/models/{model_id:path}": {JSON: information.ModelCard},
    "/tokenize": {JSON: tokens.Tokens},
    "/tokenizer_info": {JSON: tokens.TokenizerInfo},
    "/detokenize": {JSON: tokens.Detokenized},
    "/health": {JSON: information.Health},
    "/ready": {JSON: information.Health},
    "/metrics": {"text/plain": str},
    "/server_info": {JSON: information.ServerInfo},
    "/model_info": {JSON: information.ModelInfo},
    "/debug/state": {JSON: information.DebugState},
    "/debug/tree": {JSON: TreeRows},
    "/flush_cache": {JSON: information.Flushed},
    "/check_transfers": {JSON: information.Checked},
    **{path: {JSON: adapters.AdaptersChanged} for path in sorted(ADAPTER_PATHS)},
    **{
        path: {JSON: occupation.Done}
        for path in sorted(ADMIN_PATHS - {"/flush_cache", "/check_transfers"} - ADAPTER_PATHS)
    },
    "/is_sleeping": {JSON: occupation.Sleeping},
}


def document(routes: list[tuple[str, str, str, type[Strict] | None]]) -> dict[str, Any]:
    """The OpenAPI document of `routes`: method, path, name and body of each."""
    failures = {errors.ErrorAnswer, errors.AnthropicErrorAnswer, errors.LlamaErrorAnswer, errors.OllamaError}
    kinds = {kind for found in _ANSWERS.values() for kind in found.values()} | failures
    named = sorted(kinds - {str, Any}, key=str)
    schemas, defined = msgspec.json.schema_components(named, ref_template=_REF.format("{name}"))
    schema_of = {**dict(zip(named, schemas, strict=True)), str: {"type": "string"}, Any: _CHUNKS}
    _, bodies = models_json_schema(
        [(body, "validation") for _, _, _, body in routes if body is not None], ref_template=_REF.format("{model}")
    )
    described = {**bodies["$defs"], **defined}
    describe(described)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, name, body in routes:
        operation: dict[str, Any] = {
            "operationId": name,
            "summary": ROUTES.get(path.replace(":path}", "}"), name),
            "responses": _responses(method, path, schema_of),
        }
        if body is not None:
            content = {JSON: {"schema": {"$ref": _REF.format(body.__name__)}}}
            operation["requestBody"] = {"required": True, "content": content}
        if names := _PARAMETER.findall(path):
            about = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **about} for name in names]
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay", "version": __version__},
        "paths": paths,
        "security": [{}, {"key": []}, {"header": []}],
        "components": {
            "schemas": described,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _answers_of(method: str, path: str) -> dict[str, Any]:
    return _ANSWERS.get(f"{method} {path}") or _ANSWERS[path]


def _responses(method: str, path: str, schema_of: dict[Any, Any]) -> dict[str, Any]:
    error = {"description": "Refused or failed", "content": {JSON: {"schema": schema_of[_failed(path)]}}}
    content = {media: {"schema": schema_of[kind]} for media, kind in _answers_of(method, path).items()}
    found = {"200": {"description": "As asked", "content": content}, "4XX": error, "5XX": error}
    if path in _STATUS_ROUTES:
        content = {JSON: {"schema": schema_of[information.Health]}}
        found["503"] = {"description": "The reason why not", "content": content}
    return found


def _failed(path: str) -> Any:
    """The type of an error on a route."""
    if path.startswith(OLLAMA):
        return errors.OllamaError
    if path in LLAMA_SERVER:
        return errors.LlamaErrorAnswer
    return errors.AnthropicErrorAnswer if speaks_anthropic(path) else errors.ErrorAnswer
