"""The configuration in effect: /server_info, and /model_info for SGLang's clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Literal, TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.package import __version__
from forebay.base.sampling import OF_MODELS
from forebay.config.config import SETTINGS, as_divided
from forebay.engine.frames import Ready
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.admin.state import state_for
from forebay.server.context import RequestContext, ServerContext
from forebay.server.served_model import LIMITS


class ModelInfo(TypedDict):
    """The answer of /model_info: names, paths and limits of the model, in SGLang's words."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None


class AnswerFormats(TypedDict):
    """How the model spells calls and thinking: null for no format that is known, `declared` for that of the
    checkpoint's own response template."""

    tool_calls: str | None
    reasoning: str | None
    evidence: dict[str, str]


SamplingValues = TypedDict(
    "SamplingValues",
    {"source": str, **{number.name: int if number.is_whole else float for number in OF_MODELS}},  # type: ignore[misc]
)
"""Default sampling values of requests, and their source."""


class Texts(TypedDict):
    """How texts become vectors, and what a score is: how likely an answer is, the head's of a text encoder, or the
    cosine of two vectors. `prompts` are the names of tasks, `labels` those of a classification head."""

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    scores: Literal["yes_no", "head", "cosine"]
    prompts: list[str]
    labels: list[str]
    evidence: dict[str, str | None]


class ServerInfo(TypedDict):
    """The answer of /server_info: the configuration in effect, and what the model's answers and texts can be."""

    served_model_name: str
    model_path: str
    disaggregation_mode: Literal["null", "prefill", "decode"]
    disaggregation_bootstrap_port: int | None
    max_running_requests: int | None
    max_total_tokens: int | None
    context_length: int | None
    version: str
    weight_version: str
    answers: AnswerFormats
    end_tokens: dict[str, str]
    texts: Texts
    sampling: SamplingValues
    accepts_images: bool
    settings: list[dict[str, Any]]
    engine: dict[str, Any] | None
    environment: dict[str, str]
    server: dict[str, Any]
    state: dict[str, Any] | None
    may_administer: bool


def _end_tokens(server: ServerContext, of_config: Sequence[int]) -> dict[str, str]:
    """Return the reason of each token that ends an answer, by its spelling."""
    reasons = {**server.model.end_tokens, **dict.fromkeys(of_config, "the configuration's eos_token_id")}
    table = server.tokenizer.table
    return {table.spelled(token).decode(errors="replace") or str(token): why for token, why in reasons.items()}


async def server_info(request: Request, server: ServerContext) -> Response:
    """Return the effective configuration: the value of each setting, its source and its reason; the division of memory;
    limits. The state is included only for clients that may read /debug/state.

    Gateways identify such a server by the top-level fields, and by the absence of /version. They accept the document
    whole or not at all: `weight_version` must be text, as would `model`.
    """
    tenant = RequestContext.of(request.scope).tenant
    may_see_totals = server.security.may_see_totals(tenant)
    config = server.config
    elsewhere = {"api_keys", "admin_api_keys", "key_names", "tenants", "receipt_tenants", "sampling"}
    state = await state_for(request, server)
    names = (field.name for field in fields(config))
    limits = {name: getattr(config, name) for name in names if name not in elsewhere}
    return json_response(
        {
            "served_model_name": server.model.name,
            "model_path": server.model.path,
            "disaggregation_mode": server.model.mode,
            "version": __version__,
            "answers": {
                "tool_calls": server.model.answers.formats.calls,
                "reasoning": server.model.answers.formats.thinking,
                "evidence": dict(server.model.answers.evidence),
            },
            "sampling": {
                "source": config.sampling.source,
                **{number.name: getattr(server.sampling, number.name) for number in OF_MODELS},
            },
            "texts": server.model.texts.evidence,
            "accepts_images": server.images is not None,
            **_of_engine(server, server.loaded_info),
            "environment": server.environment,
            "server": limits,
            "weight_version": str(0 if state is None else state.memory.weight_version),
            "state": state if may_see_totals else None,
            "may_administer": server.security.may_administer(tenant),
        }
    )


def _of_engine(server: ServerContext, info: Ready | None) -> dict[str, Any]:
    """Return the fields that the engine reports once it has loaded the model; before, those that it has are null."""
    return {
        "disaggregation_bootstrap_port": (info.bootstrap_port or None) if info else None,
        **{name: getattr(info, name, None) for name in LIMITS},
        "end_tokens": _end_tokens(server, [] if info is None else info.eos_token_ids),
        "settings": as_divided(server.model.settings, [] if info is None else info.report),
        "engine": None if info is None else {**msgspec.to_builtins(info), "report": _report(info)},
    }


async def model_info(request: Request, server: ServerContext) -> Response:
    """Return the model's part of the information, for gateways that use a route of its own."""
    info = server.loaded_info
    return json_response(
        {
            "model_path": server.model.path,
            "tokenizer_path": server.model.path,
            "served_model_name": server.model.name,
            "is_generation": True,
            **{name: getattr(info, name, None) for name in LIMITS},
        }
    )


def _report(info: Ready) -> list[dict[str, str]]:
    return [
        dict(zip(("section", "item", "value", "reason"), row, strict=True)) for row in info.report if row[0] != SETTINGS
    ]


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/server_info",
        server_info,
        answer=ServerInfo,
        text="Every setting with its reason, the model's formats and defaults, limits and versions.",
        access=Access.MEMBER,
        forward=Forward.OWN,
    ),
    Route(
        "GET",
        "/model_info",
        model_info,
        answer=ModelInfo,
        text="The model's path and limits, as SGLang's clients ask for them.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
)
