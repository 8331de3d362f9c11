"""Scorecard D-2: what /openapi.json says is so. Requests are made from it, right and wrong ones, and every answer is
held against it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.mutants import seeds
from tests.server.conftest import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES, QUICK = 40, 1  # per operation and test, of 12 and 4 operations: the long tier makes some 7,000 requests
LONG = 12
logging.getLogger("urllib3").setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def schema(server: Running) -> Any:
    with server.client() as client:
        return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


def test_references_lead_somewhere(server: Running) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                at: Any = document
                for name in reference.removeprefix("#/").split("/"):
                    at = at[name]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    # Bodies with a wrong field, every time: tests/server/test_bad_input.py.
    [GenerationMode.POSITIVE, pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("seed", seeds(1, LONG))
def test_d2_answers_are_as_described(server: Running, schema: Any, seed: int, mode: GenerationMode) -> None:
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.POSITIVE or operation.body:  # without a body nothing in it can be wrong
            try_operation(server, operation, mode, seed)
    server.until(lambda: not server.engine.running)


def try_operation(server: Running, operation: Any, mode: GenerationMode, seed: int) -> None:
    @settings(
        max_examples=EXAMPLES if seed else QUICK, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        case.validate_response(case.call(base_url=server.url), checks=CHECKS)

    run._hypothesis_internal_use_seed = seed  # what @seed does
    run()
