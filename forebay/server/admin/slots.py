"""The state of the server as llama-server's clients ask for it: /props and /slots. No request's text is shown."""

from __future__ import annotations

from typing import Any, Final, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import Unavailable
from forebay.base.package import __version__
from forebay.http.answers import json_response
from forebay.http.route import Access, Forward, Route
from forebay.server.admin.state import current_state
from forebay.server.api.llama.completion import settings_of
from forebay.server.context import ServerContext


class DefaultSettings(TypedDict):
    """The sampling values that hold where requests give none; `n_ctx` is the context length in tokens."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(TypedDict):
    """Input besides text: images if the model has an encoder."""

    vision: bool
    audio: Literal[False]


class Props(TypedDict):
    """The answer of /props, in llama-server's fields."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    """A place for one request; which request it is, and its text, is not shown."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


async def props(request: Request, server: ServerContext) -> Response:
    """Describe the server as llama-server's /props does."""
    info, tokenizer = server.engine.info, server.tokenizer
    template, state = tokenizer.chat_template, server.engine.link.last_state
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(n_ctx=info.context_length, params=settings_of(server.sampling)),
            total_slots=info.max_running_requests,
            model_alias=server.model.name,
            model_path=server.model.path,
            modalities=Modalities(vision=server.images is not None, audio=False),
            chat_template="" if template is None else template.source,
            bos_token=_spelled(server, tokenizer.bos_token_id),
            eos_token=_spelled(server, tokenizer.eos_token_id),
            build_info=f"forebay-{__version__}",
            is_sleeping=state is not None and state.memory.phase == "asleep",
        )
    )


async def slots(request: Request, server: ServerContext) -> Response:
    """One entry for each request that may run at once. With `fail_on_no_slot=1` the answer is 503 if all run."""
    info, state = server.engine.info, await current_state(server)
    num_running = 0 if state is None else state.num_running
    if request.query_params.get("fail_on_no_slot") and num_running >= info.max_running_requests:
        raise Unavailable(f"all {info.max_running_requests} slots are in use: try again later", code="no_slot")
    n_ctx, speculative = info.context_length, state is not None and state.speculation is not None
    return json_response(
        [
            Slot(id=i, n_ctx=n_ctx, speculative=speculative, is_processing=i < num_running)
            for i in range(info.max_running_requests)
        ]
    )


def _spelled(server: ServerContext, token: int | None) -> str:
    return "" if token is None else server.tokenizer.table.spelled(token).decode("utf-8", "replace")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "GET",
        "/props",
        props,
        answer=Props,
        text="Sampling defaults, context and chat template, as llama-server's clients ask for them.",
        access=Access.USER,
        forward=Forward.ANY,
    ),
    Route(
        "GET",
        "/slots",
        slots,
        answer=list[Slot],
        text="How many requests run of those that may; nothing of what they say.",
        access=Access.TOTALS,
        forward=Forward.ANY,
    ),
)
