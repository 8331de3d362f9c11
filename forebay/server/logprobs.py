"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.requests.step_plan import TokenLogprob
from forebay.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the text and where it begins there (characters). `score` is None for a prompt's first token."""

    token_id: int
    offset: int
    score: TokenLogprob | None


def token_name(table: TokenBytes, token: int) -> str:
    """The token as text, or `bytes:\\xe2\\x80` where it is a part of a character: names stay distinct."""
    raw = table.spelled(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(table: TokenBytes, tokens: list[Scored]) -> dict[str, Any]:
    content = []
    for token in tokens:
        if token.score is not None:
            entry = _entry(table, token.token_id, token.score.logprob)
            pairs = zip(token.score.top_ids, token.score.top_logprobs, strict=True)
            content.append({**entry, "top_logprobs": [_entry(table, other, value) for other, value in pairs]})
    return {"content": content, "refusal": None}


def _entry(table: TokenBytes, token: int, logprob: float) -> dict[str, Any]:
    raw = table.spelled(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(table: TokenBytes, tokens: list[Scored], num_top: int) -> dict[str, Any]:
    """`top_logprobs` holds the `num_top` likeliest tokens and the one that was taken; None for a prompt's first."""
    return {
        "tokens": [token_name(table, token.token_id) for token in tokens],
        "token_logprobs": [None if token.score is None else token.score.logprob for token in tokens],
        "top_logprobs": [_top(table, token, num_top) for token in tokens] if num_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def _top(table: TokenBytes, token: Scored, num_top: int) -> dict[str, float] | None:
    if token.score is None:
        return None
    pairs = zip(token.score.top_ids[:num_top], token.score.top_logprobs[:num_top], strict=True)
    top = {token_name(table, other): value for other, value in pairs}
    return top | {token_name(table, token.token_id): token.score.logprob}
