"""The routes that embed and judge: /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.engine.client.embedding import (
    INSTRUCTION,
    as_type,
    nearness,
    paired,
    question,
    verdict,
)
from forebay.http.route import Access, Forward, Route
from forebay.server.api.core.pooled import INLINE_NUMBERS, PooledUsage, embedded, encoded, pooled
from forebay.server.api.core.prompts import naming, render
from forebay.server.api.openai.embeddings_request import EmbeddingRequest, RerankRequest, ScoreRequest
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.messages import ChatMessage, Templated, TemplateVariables
from forebay.server.protocol.requests import PlainText
from forebay.server.protocol.strict import Sender
from forebay.server.protocol.validation import UNSUPPORTED_FIELD


class EmbeddingData(msgspec.Struct, kw_only=True):
    """As text it is float32 in little-endian order, or a byte for each number of another type, in base64."""

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


_JUDGING: Final = Templated(chat_template_kwargs=TemplateVariables(enable_thinking=False))
_PLAIN: Final = PlainText()


async def embeddings(request: Request, server: ServerContext) -> Response:
    """Return a vector for each input. Large answers are encoded on a worker thread."""
    body = await read_body(request, server, EmbeddingRequest)
    made, usage = await embedded(request, server, body)

    def answer() -> bytes:
        typed = [as_type(vector, body.output_dtype) for vector in made]
        written = [
            base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
            for vector in typed
        ]
        data = [EmbeddingData(object="embedding", index=i, embedding=each) for i, each in enumerate(written)]
        name = RequestContext.of(request.scope).model
        return msgspec.json.encode(Embeddings(object="list", data=data, model=name, usage=usage))

    large = sum(map(len, made)) > INLINE_NUMBERS
    return _json(await server.json_workers.run(server.client, answer) if large else answer())


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
    if texts.encoder is not None and texts.encoder.labels:
        return await _by_head(request, server, body, pairs, instruction, source)
    if not texts.judges:
        if instruction is not None:
            raise InvalidRequest(
                "this model compares vectors and reads no instruction: leave it out, or put it into the texts",
                code=UNSUPPORTED_FIELD,
                param="instruction",
            )
        distinct = list(dict.fromkeys(text for pair in pairs for text in pair))

        async def alone() -> list[list[int]]:
            return await encoded(server, _PLAIN, distinct, source)

        vectors, usage = await pooled(request, server, body, len(distinct), alone, texts.vectors(), source)
        of = {text: texts.vector(vector.data) for text, vector in zip(distinct, vectors, strict=True)}
        return [nearness(of[first], of[second]) for first, second in pairs], usage

    async def asked() -> list[list[int]]:
        talks = (question(query, document, instruction or INSTRUCTION) for query, document in pairs)
        encode = server.tokenizer.encode_chat
        return [
            await render(server, encode, [ChatMessage.model_validate(said) for said in talk], _JUDGING)
            for talk in talks
        ]

    params = texts.verdicts(server.tokenizer, server.engine.info.vocab_size)
    vectors, usage = await pooled(request, server, body, len(pairs), asked, params, source)
    return [verdict(vector.data) for vector in vectors], usage


async def _by_head(
    request: Request,
    server: ServerContext,
    body: Sender,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    source: str,
) -> tuple[list[float], PooledUsage]:
    """Return the score of each pair by the one label of a text encoder's head."""
    texts = server.model.texts
    if instruction is not None or not texts.crosses:
        what = "reads no instruction" if texts.crosses else f"scores no pairs, it gives {texts.does}"
        raise InvalidRequest(
            f"this model {what}", code=UNSUPPORTED_FIELD, param="instruction" if texts.crosses else "model"
        )

    async def paired_ids() -> list[list[int]]:
        limit = server.engine.info.context_length
        return [
            await server.workers.run(
                server.client, texts.pair, server.tokenizer, *pair, size=sum(map(len, pair)), max_tokens=limit
            )
            for pair in pairs
        ]

    vectors, usage = await pooled(request, server, body, len(pairs), paired_ids, texts.labels(), source)
    return [float(texts.probabilities(vector.data)[0]) for vector in vectors], usage


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _also(route: Route[ServerContext], path: str) -> Route[ServerContext]:
    """Return the route under another path, that of other engines."""
    return replace(route, path=path)


_SCORE: Final[Route[ServerContext]] = Route(
    "POST",
    "/v1/score",
    score,
    body=ScoreRequest,
    answer=Scores,
    text="How well texts fit each other.",
    access=Access.USER,
    forward=Forward.PROMPT,
)
_RERANK: Final[Route[ServerContext]] = Route(
    "POST",
    "/v1/rerank",
    rerank,
    body=RerankRequest,
    answer=Reranked | list[ScoredText],
    text="Documents by how well they meet a query, the best first.",
    access=Access.USER,
    forward=Forward.PROMPT,
)
ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        body=EmbeddingRequest,
        answer=Embeddings,
        text="The vectors of texts.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    _SCORE,
    _also(_SCORE, "/score"),
    _RERANK,
    _also(_RERANK, "/rerank"),
)
