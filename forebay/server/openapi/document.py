"""/openapi.json: what each route declares, with the schemas of its body and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from pydantic.json_schema import models_json_schema

from forebay.base.package import __version__
from forebay.http import errors
from forebay.http.errors import LLAMA_SERVER, OLLAMA, speaks_anthropic
from forebay.http.route import JSON, Route
from forebay.server.openapi.descriptions import describe

_REF: Final = "#/components/schemas/{}"
_CHUNKS: Final = {"description": "A stream of events or of lines, each of them JSON."}


def document(routes: Sequence[Route[Any]]) -> dict[str, Any]:
    """Return the OpenAPI document of `routes`."""
    failures = {errors.ErrorAnswer, errors.AnthropicErrorAnswer, errors.LlamaErrorAnswer, errors.OllamaError}
    named = sorted(({route.answer for route in routes} | failures) - {str}, key=str)
    schemas, defined = msgspec.json.schema_components(named, ref_template=_REF.format("{name}"))
    schema_of = {**dict(zip(named, schemas, strict=True)), str: {"type": "string"}}
    _, bodies = models_json_schema(
        [(route.body, "validation") for route in routes if route.body is not None], ref_template=_REF.format("{model}")
    )
    described = dict(sorted({**bodies["$defs"], **defined}.items()))
    describe(described)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route, schema_of)
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


def _operation(route: Route[Any], schema_of: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.text,
        "responses": _responses(route, schema_of),
    }
    if route.body is not None:
        content = {JSON: {"schema": {"$ref": _REF.format(route.body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.parameters:
        about = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **about} for name in route.parameters]
    return operation


def _responses(route: Route[Any], schema_of: dict[Any, Any]) -> dict[str, Any]:
    error = {"description": "Refused or failed", "content": {JSON: {"schema": schema_of[_failed(route.path)]}}}
    content = {route.media: {"schema": schema_of[route.answer]}}
    if route.stream:
        content[route.stream] = {"schema": _CHUNKS}
    found = {"200": {"description": "As asked", "content": content}, "4XX": error, "5XX": error}
    if route.unavailable is not None:
        content = {JSON: {"schema": schema_of[route.unavailable]}}
        found["503"] = {"description": "The reason why not", "content": content}
    return found


def _failed(path: str) -> Any:
    """Return the type of an error on a route."""
    if path.startswith(OLLAMA):
        return errors.OllamaError
    if path in LLAMA_SERVER:
        return errors.LlamaErrorAnswer
    return errors.AnthropicErrorAnswer if speaks_anthropic(path) else errors.ErrorAnswer
