"""Prompts that are pooled: encoded, sent to the engine as a batch, and counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.embedding import (
    check_dimensions,
)
from forebay.http.lifecycle import ClientGone
from forebay.requests.sampling_params import SamplingParams
from forebay.scheduler.limits import check_context
from forebay.server.api.core.generation import CachedDetails, CacheUsage, cache_usage
from forebay.server.api.core.pooling import Batch, Vector
from forebay.server.api.core.prompts import naming, prompt_ids
from forebay.server.api.core.spans import note_tokens
from forebay.server.api.openai.embeddings_request import MAX_INPUTS, EmbeddingRequest
from forebay.server.context import RequestContext, ServerContext
from forebay.server.protocol.requests import PlainText
from forebay.server.protocol.strict import Sender

INLINE_NUMBERS: Final = 1 << 14  # writing this many takes about a millisecond

log = get_logger("server")


class PooledUsage(msgspec.Struct, kw_only=True):
    """The usage of prompts without generated tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    cache: CacheUsage


async def embedded(
    request: Request, server: ServerContext, body: EmbeddingRequest
) -> tuple[list[npt.NDArray[np.float32]], PooledUsage]:
    """The vector of each input, and what they took."""
    texts, inputs = server.model.texts, body.inputs

    with naming("input"):
        asked = [texts.with_prompt(each, body.prompt_name) if isinstance(each, str) else each for each in inputs]

    async def prompts() -> list[list[int]]:
        return await encoded(server, body, asked, "input")

    check_dimensions(body.dimensions, server.engine.info.vector_size)
    vectors, usage = await pooled(request, server, body, len(inputs), prompts, texts.vectors(), "input")
    return [texts.vector(vector.data, body.dimensions) for vector in vectors], usage


async def encoded(
    server: ServerContext, body: PlainText, texts: Sequence[str | list[int | str]], source: str
) -> list[list[int]]:
    """Return the token ids of each text."""
    return [await _input_ids(server, body, text, source) for text in texts]


async def _input_ids(server: ServerContext, body: PlainText, pieces: str | list[int | str], source: str) -> list[int]:
    """The tokens of an input. Special tokens are put around a text that begins it alone."""
    if isinstance(pieces, str):
        return await prompt_ids(server, body, pieces, source)
    ids: list[int] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if not is_text:
            ids += await prompt_ids(server, body, [piece for piece in run if isinstance(piece, int)], source)
            continue
        for text in run:
            bare = body.model_copy(update={"add_special_tokens": False}) if ids else body
            ids += await prompt_ids(server, bare, str(text), source)
    return ids


async def pooled(
    request: Request,
    server: ServerContext,
    body: Sender,
    count: int,
    prompts: Callable[[], Awaitable[list[list[int]]]],
    params: SamplingParams,
    source: str,
) -> tuple[list[Vector], PooledUsage]:
    """Return the result of each of `count` prompts, and the usage. `source` is the field that they come from."""
    info, context = server.engine.info, RequestContext.of(request.scope)
    server.check_model(context, body.model)
    if server.model.mode is DisaggregationMode.DECODE:
        raise InvalidRequest(
            "this server decodes what others have read: send what is to be embedded or scored to a prefill server",
            code="wrong_role",
        )
    if count > MAX_INPUTS:
        raise InvalidRequest(f"{source} has {count} entries; at most {MAX_INPUTS} are taken at a time", param=source)
    most = min(count, info.max_running_requests)
    namespace = server.isolation.namespace(context.tenant, body.session)
    author, tenant = server.isolation.author(context.tenant, body.session), context.tenant.name
    own: dict[str, Any] = {"namespace": namespace, "author": author, "tenant": tenant}
    own |= {"adapter": context.adapter, "adapter_number": context.adapter_number if count > 1 else 0}
    submit = partial(server.engine.submit, params=params, **own)

    with server.lifecycle.admit(context.tenant.name, most):
        with naming(source):
            made = await prompts()
            for token_ids in made:
                check_context(len(token_ids), 0, info.context_length)
        if context.client.watch.gone:
            raise ClientGone
        batch = Batch(lambda token_ids: submit(prompt_token_ids=token_ids), made)
        batch.started_at = context.arrived_at
        context.client.watch.on_gone(batch.leave)
        try:
            batch.start(most)
            vectors = await batch.ended()
            if batch.aborted:
                raise ClientGone
        finally:
            batch.abort()
            _count(server, context, batch)
    return vectors, _usage(server, context, batch)


def _usage(server: ServerContext, context: RequestContext, batch: Batch) -> PooledUsage:
    """OpenAI's usage, with what the prefix cache did."""
    num_tokens = sum(map(len, batch.prompts))
    vectors = [batch.vectors[place] for place in sorted(batch.vectors)]
    context.note_cache(vectors, num_tokens)
    cache = cache_usage([vector.cache for vector in vectors], server.tokenizer.table)
    return PooledUsage(
        prompt_tokens=num_tokens,
        total_tokens=num_tokens,
        prompt_tokens_details=CachedDetails(cached_tokens=cache.cached_tokens),
        weight_version=max(vector.weight_version for vector in vectors),
        adapter=context.adapter or UNSET,
        cache=cache,
    )


def _count(server: ServerContext, context: RequestContext, batch: Batch) -> None:
    """One line and the metrics of prompts that have ended."""
    now = time.monotonic()
    server.metrics.count_pooled(batch, now)
    if context.trace is not None:
        context.trace.add("tokenize", context.arrived_at, batch.started_at)
        context.trace.add("prefill", batch.started_at, now)
        cached = sum(vector.cache.cached_tokens for vector in batch.vectors.values())
        note_tokens(context.trace, context, sum(map(len, batch.prompts)), cached)
    log.info(
        event(
            "pooled",
            id=context.request_id,
            prompts=len(batch.prompts),
            ended=len(batch.vectors),
            prompt_tokens=sum(map(len, batch.prompts)),
            cached_tokens=sum(vector.cache.cached_tokens for vector in batch.vectors.values()),
            seconds=now - batch.started_at,
            **({"adapter": context.adapter} if context.adapter else {}),
            **({"finish": "disconnect"} if batch.aborted else {}),
            **({"error": batch.error.code} if isinstance(batch.error, ForebayError) else {}),
        )
    )
