"""The routes that embed and judge: /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.config.engine_config import DisaggregationMode
from forebay.engine.client.embedding import (
    INSTRUCTION,
    check_dimensions,
    nearness,
    paired,
    question,
    verdict,
)
from forebay.requests.sampling_params import SamplingParams
from forebay.scheduler.limits import check_context
from forebay.server.api.embeddings_request import MAX_INPUTS, EmbeddingRequest, RerankRequest, ScoreRequest
from forebay.server.api.generation import CachedDetails, CacheUsage, cache_usage
from forebay.server.api.ollama_request import OllamaEmbeddingsRequest, OllamaEmbedRequest
from forebay.server.api.pooling import Batch, Vector
from forebay.server.api.prompts import naming, prompt_ids, render
from forebay.server.api.renaming import renamed
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.http.lifecycle import ClientGone
from forebay.server.protocol.messages import ChatMessage, Templated, TemplateVariables
from forebay.server.protocol.requests import PlainText
from forebay.server.protocol.strict import Sender
from forebay.server.protocol.validation import UNSUPPORTED_FIELD


class PooledUsage(msgspec.Struct, kw_only=True):
    """The usage of prompts without generated tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    weight_version: int
    adapter: str | UnsetType = UNSET  # the LoRA adapter that was applied
    cache: CacheUsage


class EmbeddingData(msgspec.Struct, kw_only=True):
    """As text it is float32 in little-endian order, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: PooledUsage


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """The answer of /v1/score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PooledUsage


class RankedText(msgspec.Struct, kw_only=True):
    """The text of a ranked document."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """A document's place in the order of relevance; `index` is its place in the request."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class ScoredText(msgspec.Struct, kw_only=True):
    """In the form of text-embeddings-inference."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Reranked(msgspec.Struct, kw_only=True):
    """The answer of /v1/rerank: the most relevant document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage


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


INLINE_NUMBERS: Final = 1 << 14  # to write so many takes about a millisecond
_JUDGING: Final = Templated(chat_template_kwargs=TemplateVariables(enable_thinking=False))
_PLAIN: Final = PlainText()

log = get_logger("server")


async def embeddings(request: Request, server: ServerContext) -> Response:
    """Return a vector for each input. Large answers are encoded on a worker thread."""
    body = await read_body(request, server, EmbeddingRequest)
    made, usage = await _embedded(request, server, body)

    def answer() -> bytes:
        written = [
            base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
            for vector in made
        ]
        data = [EmbeddingData(object="embedding", index=i, embedding=each) for i, each in enumerate(written)]
        name = RequestContext.of(request.scope).model
        return msgspec.json.encode(Embeddings(object="list", data=data, model=name, usage=usage))

    large = sum(map(len, made)) > INLINE_NUMBERS
    return _json(await server.json_workers.run(server.client, answer) if large else answer())


async def ollama_embed(request: Request, server: ServerContext) -> Response:
    """Answer with embeddings in Ollama's form."""
    body = await read_body(request, server, OllamaEmbedRequest)
    server.check_model(RequestContext.of(request.scope), body.model_name)
    made, usage = await _embedded(request, server, body.embedding)
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
        ((vector,), _) = await _embedded(request, server, body.embedding)
    return _json(msgspec.json.encode(OllamaEmbedding(embedding=vector.tolist())))


async def _embedded(
    request: Request, server: ServerContext, body: EmbeddingRequest
) -> tuple[list[npt.NDArray[np.float32]], PooledUsage]:
    """The vector of each input, and what they took."""
    texts, inputs = server.model.texts, body.inputs

    async def prompts() -> list[list[int]]:
        return await _encoded(server, body, inputs, "input")

    check_dimensions(body.dimensions, server.engine.info.hidden_size)
    vectors, usage = await _pooled(request, server, body, len(inputs), prompts, texts.vectors(), "input")
    return [texts.vector(vector.data, body.dimensions) for vector in vectors], usage


async def score(request: Request, server: ServerContext) -> Response:
    """Return how likely the model judges each pair of texts to match."""
    body = await read_body(request, server, ScoreRequest)
    with naming("text_1"):
        pairs = paired(body.text_1, body.text_2)
    scores, usage = await _scores(request, server, body, pairs, body.instruction, "text_2")
    data = [ScoreData(index=i, object="score", score=value) for i, value in enumerate(scores)]
    context, created = RequestContext.of(request.scope), int(time.time())
    answer_id, name = f"score-{context.request_id}", context.model
    answer = Scores(id=answer_id, object="list", created=created, model=name, data=data, usage=usage)
    return _json(msgspec.json.encode(answer))


async def rerank(request: Request, server: ServerContext) -> Response:
    """The documents by how well they fit the query, the best first; of equal ones those that came first."""
    body = await read_body(request, server, RerankRequest)
    texts = body.all_texts
    pairs = [(body.query, text) for text in texts]
    scores, usage = await _scores(request, server, body, pairs, body.instruction, body.source)
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
    if body.texts is not None:
        listed = [ScoredText(index=i, score=scores[i], text=texts[i] if body.return_text else UNSET) for i in best]
        return _json(msgspec.json.encode(listed))
    results = [
        Ranked(
            index=i,
            relevance_score=scores[i],
            document=RankedText(text=texts[i]) if body.return_documents else UNSET,
        )
        for i in best
    ]
    context = RequestContext.of(request.scope)
    answer_id, name = f"rerank-{context.request_id}", context.model
    answer = Reranked(id=answer_id, model=name, results=results, usage=usage)
    return _json(msgspec.json.encode(answer))


async def _scores(
    request: Request,
    server: ServerContext,
    body: Sender,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    source: str,
) -> tuple[list[float], PooledUsage]:
    """Return the score of each pair, and the usage."""
    texts = server.model.texts
    if not texts.judges:
        if instruction is not None:
            raise InvalidRequest(
                "this model compares vectors and reads no instruction: leave it out, or put it into the texts",
                code=UNSUPPORTED_FIELD,
                param="instruction",
            )
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))

        async def alone() -> list[list[int]]:
            return await _encoded(server, _PLAIN, distinct, source)

        vectors, usage = await _pooled(request, server, body, len(distinct), alone, texts.vectors(), source)
        of = {text: texts.vector(vector.data) for text, vector in zip(distinct, vectors, strict=True)}
        return [nearness(of[first], of[second]) for first, second in pairs], usage

    async def asked() -> list[list[int]]:
        talks = (question(query, document, instruction or INSTRUCTION) for query, document in pairs)
        encode = server.tokenizer.encode_chat
        return [await render(server, encode, [ChatMessage(**said) for said in talk], _JUDGING) for talk in talks]

    params = texts.verdicts(server.tokenizer, server.engine.info.vocab_size)
    vectors, usage = await _pooled(request, server, body, len(pairs), asked, params, source)
    return [verdict(vector.data) for vector in vectors], usage


async def _encoded(
    server: ServerContext, body: PlainText, texts: Sequence[str | list[int | str]], source: str
) -> list[list[int]]:
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


async def _pooled(
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
    cache = cache_usage([batch.vectors[place].cache for place in sorted(batch.vectors)], server.tokenizer.table)
    return PooledUsage(
        prompt_tokens=num_tokens,
        total_tokens=num_tokens,
        prompt_tokens_details=CachedDetails(cached_tokens=cache.cached_tokens),
        weight_version=max(vector.weight_version for vector in batch.vectors.values()),
        adapter=context.adapter or UNSET,
        cache=cache,
    )


def _count(server: ServerContext, context: RequestContext, batch: Batch) -> None:
    """One line and the metrics of prompts that have ended."""
    now = time.monotonic()
    server.metrics.count_pooled(batch, now)
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


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
