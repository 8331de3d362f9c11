"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from forebay.base.values import values_of
from forebay.engine.client.scores import Scored, ranked, token_name
from forebay.text.answers.parts import CallArguments, Kind, Said, Thought
from forebay.text.token_bytes import TokenBytes


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """The log-probabilities of a text completion, as parallel lists with an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class RankedLogprob(msgspec.Struct, kw_only=True):
    """The log-probability of a prompt token, with its rank among all tokens (1: the most likely)."""

    logprob: float
    rank: int | None
    decoded_token: str


class Alternative(msgspec.Struct, kw_only=True):
    """A token that could have come at a position; `bytes` are its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Alternative, kw_only=True):
    """A generated token with its log-probability, and the most likely alternatives."""

    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """`content` has the tokens of the text; where answers are read, the others are in the lists of what they belong
    to."""

    content: list[ScoredToken]
    reasoning_content: list[ScoredToken] | UnsetType = UNSET
    tool_calls: list[ScoredToken] | UnsetType = UNSET
    refusal: None


def chat_logprobs(table: TokenBytes, tokens: list[Scored], *, read: bool) -> ChatLogprobs:
    """Return the log-probabilities of the text's tokens; of an answer that is `read`, those of thinking and calls in
    lists of their own."""
    found: dict[Kind, list[ScoredToken]] = {kind: [] for kind in ((Said, Thought, CallArguments) if read else (Said,))}
    for token in tokens:
        found[token.kind] += text_logprobs(table, [token])
    return ChatLogprobs(
        content=found[Said],
        reasoning_content=found.get(Thought, UNSET),
        tool_calls=found.get(CallArguments, UNSET),
        refusal=None,
    )


def text_logprobs(table: TokenBytes, tokens: Sequence[Scored]) -> list[ScoredToken]:
    """Return for each token that has a score the token itself and the likeliest ones."""
    entries = []
    for token in tokens:
        if token.score is not None:
            pairs = zip(token.score.top_ids, token.score.top_logprobs, strict=True)
            others = [_alternative(table, other, value) for other, value in pairs]
            own = _alternative(table, token.token_id, token.score.logprob)
            entries.append(ScoredToken(**values_of(own), top_logprobs=others))
    return entries


def _alternative(table: TokenBytes, token: int, logprob: float) -> Alternative:
    raw = table.spelled(token)
    return Alternative(token=raw.decode("utf-8", "replace"), logprob=logprob, bytes=list(raw))


def completion_logprobs(table: TokenBytes, tokens: list[Scored], num_top: int) -> CompletionLogprobs:
    """`top_logprobs` holds the `num_top` likeliest tokens and the one that was taken; None for a prompt's first."""
    return CompletionLogprobs(
        tokens=[token_name(table, token.token_id) for token in tokens],
        token_logprobs=[None if token.score is None else token.score.logprob for token in tokens],
        top_logprobs=[_top(table, token, num_top) for token in tokens] if num_top else None,
        text_offset=[token.offset for token in tokens],
    )


def _top(table: TokenBytes, token: Scored, num_top: int) -> dict[str, float] | None:
    if token.score is None:
        return None
    pairs = zip(token.score.top_ids[:num_top], token.score.top_logprobs[:num_top], strict=True)
    top = {token_name(table, other): value for other, value in pairs}
    return top | {token_name(table, token.token_id): token.score.logprob}


def prompt_logprobs(table: TokenBytes, tokens: list[Scored], num_top: int) -> list[dict[str, RankedLogprob] | None]:
    """In vLLM's shape: of each token, by id, itself and the `num_top` likeliest; None for the first."""
    return [
        None
        if token.score is None
        else {
            str(i): RankedLogprob(logprob=known.logprob, rank=known.rank, decoded_token=known.decoded_token)
            for i, known in ranked(table, token.token_id, token.score, num_top).items()
        }
        for token in tokens
    ]
