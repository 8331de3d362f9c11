"""The routes of text encoders: /classify, /pooling, and those of text-embeddings-inference, /embed, /embed_sparse and
/predict."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from forebay.base.errors import InvalidRequest
from forebay.engine.client.embedding import TOKEN_CLASSIFY, Texts, check_dimensions, unweighed_ids
from forebay.http.route import Access, Forward, Route
from forebay.server.api.core.pooled import INLINE_NUMBERS, PooledUsage, embedded, encoded, pooled
from forebay.server.api.core.prompts import naming
from forebay.server.api.openai.embeddings_request import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSparseRequest,
)
from forebay.server.context import RequestContext, ServerContext, read_body
from forebay.server.protocol.requests import PlainText
from forebay.server.protocol.strict import Sender

MAX_NUMBERS: Final = 1 << 24
"""The most numbers of the vectors of one request's tokens, which are made into text in one piece."""


class LabelData(msgspec.Struct, kw_only=True):
    """The likeliest label of a text, and the probability of each; of a head for tokens, those of each token."""

    index: int
    label: str | list[str]
    probs: list[float | list[float]]
    num_classes: int


class Classified(msgspec.Struct, kw_only=True):
    """The answer of /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelData]
    usage: PooledUsage


class TokenVectors(msgspec.Struct, kw_only=True):
    """The vectors of a text's tokens; as text they are float32 in little-endian order, in base64."""

    index: int
    object: Literal["pooling"]
    data: list[list[float]] | str


class Pooled(msgspec.Struct, kw_only=True):
    """The answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TokenVectors]
    usage: PooledUsage


class Word(msgspec.Struct, kw_only=True):
    """A token of a text, by its id, with its weight."""

    index: int
    value: float


class Predicted(msgspec.Struct, kw_only=True):
    """A label with its probability."""

    label: str
    score: float


async def _of_labels(
    request: Request, server: ServerContext, body: PlainText, sender: Sender, inputs: Sequence[Any], source: str
) -> tuple[list[Any], PooledUsage]:
    """Return the probabilities of each input, and the usage."""
    texts = server.model.texts
    params = texts.labels()

    async def prompts() -> list[list[int]]:
        return await encoded(server, body, inputs, source)

    vectors, usage = await pooled(request, server, sender, len(inputs), prompts, params, source)
    return [texts.probabilities(vector.data) for vector in vectors], usage


async def classify(request: Request, server: ServerContext) -> Response:
    """Return the labels of texts, with the probability of each."""
    body = await read_body(request, server, ClassifyRequest)
    shares, usage = await _of_labels(request, server, body, body, body.inputs, "input")
    names, context = _labels(server), RequestContext.of(request.scope)

    def labelled(index: int, values: Any) -> LabelData:
        best = [names[i] for i in values.reshape(-1, len(names)).argmax(axis=1).tolist()]
        label = best if values.ndim > 1 else best[0]
        return LabelData(index=index, label=label, probs=values.tolist(), num_classes=len(names))

    answer = Classified(
        id=f"classify-{context.request_id}",
        object="list",
        created=int(time.time()),
        model=context.model,
        data=[labelled(i, values) for i, values in enumerate(shares)],
        usage=usage,
    )
    return _json(msgspec.json.encode(answer))


async def pooling(request: Request, server: ServerContext) -> Response:
    """Return the vector of each token of texts. Large answers are encoded on a worker thread."""
    body = await read_body(request, server, PoolingRequest)
    width = server.engine.info.hidden_size
    texts = server.model.texts
    params, weighs = texts.of_each_token(body.task), body.task == TOKEN_CLASSIFY
    made: list[list[int]] = []

    async def prompts() -> list[list[int]]:
        made.extend(await encoded(server, body, body.inputs, "input"))
        if (count := sum(map(len, made)) * width) > MAX_NUMBERS:
            raise InvalidRequest(
                f"the vectors of all tokens have {count} numbers; at most {MAX_NUMBERS} are answered at a time: send "
                "fewer texts",
                param="input",
            )
        return made

    vectors, usage = await pooled(request, server, body, len(body.inputs), prompts, params, "input")
    context = RequestContext.of(request.scope)

    def answer() -> bytes:
        if weighs:
            left_out = unweighed_ids(server.tokenizer)
            tables = [_weights_of(texts, vector.data, ids, left_out) for vector, ids in zip(vectors, made, strict=True)]
        else:
            tables = [texts.token_vectors(vector.data, width) for vector in vectors]
        packed = body.encoding_format == "base64"
        written = [base64.b64encode(table.tobytes()).decode() if packed else table.tolist() for table in tables]
        data = [TokenVectors(index=i, object="pooling", data=each) for i, each in enumerate(written)]
        answer_id, now = f"pooling-{context.request_id}", int(time.time())
        whole = Pooled(id=answer_id, object="list", created=now, model=context.model, data=data, usage=usage)
        return msgspec.json.encode(whole)

    large = sum(len(vector.data) for vector in vectors) > 4 * INLINE_NUMBERS
    return _json(await server.json_workers.run(server.client, answer) if large else answer())


def _weights_of(texts: Texts, data: bytes, ids: Sequence[int], left_out: Collection[int]) -> npt.NDArray[np.float32]:
    """Return the weights of a text's words, [words, 1]."""
    kept = [i for i, token in enumerate(ids) if token not in left_out]
    return texts.word_weights(data)[kept].astype("<f4").reshape(-1, 1)


async def embed_sparse(request: Request, server: ServerContext) -> Response:
    """Return the weight of each word of texts, in the form of text-embeddings-inference: of a word that comes again
    the largest, of one without weight nothing."""
    body = await read_body(request, server, TeiSparseRequest)
    texts = server.model.texts
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    params = texts.of_each_token(TOKEN_CLASSIFY)
    with naming("inputs"):
        asked = [texts.with_prompt(text, body.prompt_name) for text in inputs]
    made: list[list[int]] = []

    async def prompts() -> list[list[int]]:
        made.extend(await encoded(server, PlainText(), asked, "inputs"))
        return made

    vectors, _ = await pooled(request, server, Sender(), len(asked), prompts, params, "inputs")
    left_out = unweighed_ids(server.tokenizer)
    words = [_words(texts.word_weights(vector.data), ids, left_out) for vector, ids in zip(vectors, made, strict=True)]
    return _json(msgspec.json.encode(words))


def _words(weights: npt.NDArray[np.float64], ids: Sequence[int], left_out: Collection[int]) -> list[Word]:
    largest: dict[int, float] = {}
    for token, weight in zip(ids, weights.tolist(), strict=True):
        if weight > largest.get(token, 0.0) and token not in left_out:
            largest[token] = weight
    return [Word(index=token, value=largest[token]) for token in sorted(largest)]


async def embed(request: Request, server: ServerContext) -> Response:
    """Return the vectors of texts, in the form of text-embeddings-inference."""
    body = await read_body(request, server, TeiEmbedRequest)
    check_dimensions(body.dimensions, server.engine.info.vector_size)
    if not body.normalize and server.model.texts.embedding.normalize:
        raise InvalidRequest("normalize is false; this model's vectors have length 1: leave it out", param="normalize")
    inputs: list[str | list[int | str]] = [body.inputs] if isinstance(body.inputs, str) else [*body.inputs]
    asked = EmbeddingRequest(input=inputs, dimensions=body.dimensions, prompt_name=body.prompt_name)
    made, _ = await embedded(request, server, asked)

    def answer() -> bytes:
        return msgspec.json.encode([vector.tolist() for vector in made])

    large = sum(map(len, made)) > INLINE_NUMBERS
    return _json(await server.json_workers.run(server.client, answer) if large else answer())


async def predict(request: Request, server: ServerContext) -> Response:
    """Return the labels of texts, the likeliest first, in the form of text-embeddings-inference."""
    body = await read_body(request, server, TeiPredictRequest)
    one = isinstance(body.inputs, str)
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    shares, _ = await _of_labels(request, server, PlainText(), Sender(), inputs, "inputs")
    names = _labels(server)
    if any(values.ndim > 1 for values in shares):
        raise InvalidRequest("this model labels tokens: use /classify", code="no_labels", param="model")
    ranked = [
        sorted(
            (Predicted(label=name, score=share) for name, share in zip(names, values.tolist(), strict=True)),
            key=lambda each: -each.score,
        )
        for values in shares
    ]
    return _json(msgspec.json.encode(ranked[0] if one else ranked))


def _labels(server: ServerContext) -> tuple[str, ...]:
    encoder = server.model.texts.encoder
    return () if encoder is None else encoder.labels


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


ROUTES: Final[tuple[Route[ServerContext], ...]] = (
    Route(
        "POST",
        "/classify",
        classify,
        body=ClassifyRequest,
        answer=Classified,
        text="The labels of texts.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    Route(
        "POST",
        "/pooling",
        pooling,
        body=PoolingRequest,
        answer=Pooled,
        text="The vectors of the tokens of texts.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    Route(
        "POST",
        "/embed",
        embed,
        body=TeiEmbedRequest,
        answer=list[list[float]],
        text="The vectors of texts, in the form of text-embeddings-inference.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    Route(
        "POST",
        "/embed_sparse",
        embed_sparse,
        body=TeiSparseRequest,
        answer=list[list[Word]],
        text="The weights of the words of texts, in the form of text-embeddings-inference.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
    Route(
        "POST",
        "/predict",
        predict,
        body=TeiPredictRequest,
        answer=list[Predicted | list[Predicted]],
        text="The labels of texts, in the form of text-embeddings-inference.",
        access=Access.USER,
        forward=Forward.PROMPT,
    ),
)
