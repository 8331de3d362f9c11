"""The shapes of the answers to what is embedded and judged, for /openapi.json, as in `server.openapi.answers`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from forebay.server.answering.cache_usage import CacheUsage
from forebay.server.openapi.answers import CachedDetails


class PooledUsage(TypedDict):
    """The usage of prompts without generated tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    weight_version: int
    cache: CacheUsage


class EmbeddingData(TypedDict):
    """As text it is float32 in little-endian order, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: PooledUsage


class ScoreData(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PooledUsage


class RankedText(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class ScoredText(TypedDict):
    """In the form of text-embeddings-inference."""

    index: int
    score: float
    text: NotRequired[str]


class Reranked(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
