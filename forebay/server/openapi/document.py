"""/openapi.json: the bodies that are taken, from the types that take them, and the answers."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from pydantic.json_schema import models_json_schema

from forebay.base.package import __version__
from forebay.server.admin.aborting import Aborted
from forebay.server.admin.tree import TreeRows
from forebay.server.api import embeddings as embedding_answers
from forebay.server.http.errors import LLAMA_SERVER, MESSAGES, OLLAMA, RESPONSES, speaks_anthropic
from forebay.server.http.security import ADMIN_PATHS
from forebay.server.openapi import answers, neighbours, response_answers
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
    "/v1/chat/completions": {JSON: answers.ChatCompletion, EVENTS: Any},
    "/v1/completions": {JSON: answers.Completion, EVENTS: Any},
    "/generate": {JSON: answers.Generated | list[answers.Generated], EVENTS: Any},
    MESSAGES: {JSON: answers.AnthropicMessage, EVENTS: Any},
    f"{MESSAGES}/count_tokens": {JSON: answers.TokenCount},
    RESPONSES: {JSON: response_answers.ModelResponse, EVENTS: Any},
    f"{RESPONSES}/input_tokens": {JSON: response_answers.ResponseInputTokens},
    f"{RESPONSES}/{{response_id}}": {JSON: response_answers.ModelResponse},
    f"DELETE {RESPONSES}/{{response_id}}": {JSON: response_answers.DeletedResponse},
    "/completion": {JSON: neighbours.LlamaCompletion | list[neighbours.LlamaCompletion], EVENTS: Any},
    "/apply-template": {JSON: neighbours.TemplateText},
    "/props": {JSON: neighbours.Props},
    "/slots": {JSON: list[neighbours.Slot]},
    "/api/chat": {JSON: neighbours.OllamaChat, LINES: Any},
    "/api/generate": {JSON: neighbours.OllamaGenerated, LINES: Any},
    "/api/embed": {JSON: neighbours.OllamaEmbeddings},
    "/api/show": {JSON: neighbours.OllamaShown},
    "/api/tags": {JSON: neighbours.OllamaTags},
    "/api/version": {JSON: neighbours.OllamaVersion},
    "/abort_request": {JSON: Aborted},
    "/v1/embeddings": {JSON: embedding_answers.Embeddings},
    "/v1/score": {JSON: embedding_answers.Scores},
    "/v1/rerank": {JSON: embedding_answers.Reranked | list[embedding_answers.ScoredText]},
    "/v1/models": {JSON: answers.ModelList},
    "/v1/models/{model_id:path}": {JSON: answers.ModelCard},
    "/tokenize": {JSON: answers.Tokens},
    "/tokenizer_info": {JSON: answers.TokenizerInfo},
    "/detokenize": {JSON: answers.Detokenized},
    "/health": {JSON: answers.Health},
    "/ready": {JSON: answers.Health},
    "/metrics": {"text/plain": str},
    "/server_info": {JSON: answers.ServerInfo},
    "/model_info": {JSON: answers.ModelInfo},
    "/debug/state": {JSON: answers.DebugState},
    "/debug/tree": {JSON: TreeRows},
    "/flush_cache": {JSON: answers.Flushed},
    "/check_transfers": {JSON: answers.Checked},
    **{path: {JSON: answers.Done} for path in sorted(ADMIN_PATHS - {"/flush_cache", "/check_transfers"})},
    "/is_sleeping": {JSON: answers.Sleeping},
}


def document(routes: list[tuple[str, str, str, type[Strict] | None]]) -> dict[str, Any]:
    """The OpenAPI document of `routes`: method, path, name and body of each."""
    errors = {answers.ErrorAnswer, answers.AnthropicErrorAnswer, neighbours.LlamaErrorAnswer, neighbours.OllamaError}
    kinds = {kind for found in _ANSWERS.values() for kind in found.values()} | errors
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
        content = {JSON: {"schema": schema_of[answers.Health]}}
        found["503"] = {"description": "The reason why not", "content": content}
    return found


def _failed(path: str) -> Any:
    """The type of an error on a route."""
    if path.startswith(OLLAMA):
        return neighbours.OllamaError
    if path in LLAMA_SERVER:
        return neighbours.LlamaErrorAnswer
    return answers.AnthropicErrorAnswer if speaks_anthropic(path) else answers.ErrorAnswer
