"""Log-probabilities of the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from forebay.requests.step_plan import TokenLogprob
from forebay.text.answers.parts import Kind, Reader, Said, Thought
from forebay.text.detokenizer import Detokenizer
from forebay.text.token_bytes import TokenBytes


class Logprob(NamedTuple):
    """`rank` is the token's place among all of them, 1 the most likely; None if it is unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the text and where it begins there (characters). `score` is None for a prompt's first token. `kind`
    is what of an answer that is read it belongs to."""

    token_id: int
    offset: int
    score: TokenLogprob | None
    kind: Kind = Said


class WaitingScores:
    """Scores of a choice's tokens are sent with the text of the tokens, so that scores behind a stop string are not
    sent. If the answer is read, scores wait until the kinds of their characters are known."""

    def __init__(self, detokenizer: Detokenizer, reader: Reader | None, *, with_thinking: bool) -> None:
        self._detokenizer = detokenizer
        self._reader = reader
        self._with_thinking = with_thinking
        self._tokens: list[Scored] = []

    def add(self, token_ids: Sequence[int], scores: Sequence[TokenLogprob]) -> None:
        """Add the scores of the tokens that were pushed last."""
        self._tokens += map(Scored, token_ids, self._detokenizer.offsets[-len(token_ids) :], scores)

    def released(self, *, everything: bool, ended: bool) -> list[Scored]:
        """`everything`: no text is held back any more. `ended`: none comes."""
        count = 0
        while count < len(self._tokens) and (everything or self._is_settled(count, ended)):
            count += 1
        if not count:
            return []
        released = [self._placed(i) for i in range(count)]
        del self._tokens[:count]
        return [token for token in released if token.kind is not Thought or self._with_thinking]

    def _is_settled(self, i: int, ended: bool) -> bool:
        if self._reader is None or ended:
            return self._tokens[i].offset < self._detokenizer.num_chars
        return self._end(i) <= self._reader.settled

    def _placed(self, i: int) -> Scored:
        token = self._tokens[i]
        return token if self._reader is None else replace(token, kind=self._reader.kind(token.offset, self._end(i)))

    def _end(self, i: int) -> int:
        """Where a token's characters end, of which each has one at least: that which it is a part of."""
        behind = self._tokens[i + 1].offset if i + 1 < len(self._tokens) else self._detokenizer.num_decoded
        return max(self._tokens[i].offset + 1, behind)


def token_name(table: TokenBytes, token: int) -> str:
    """The token as text, or `bytes:\\xe2\\x80` if it is a part of a character: names stay distinct."""
    raw = table.spelled(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def ranked(table: TokenBytes, token: int, score: TokenLogprob, num_top: int) -> dict[int, Logprob]:
    """By id, the token itself and the `num_top` likeliest."""
    values = dict(zip(score.top_ids, score.top_logprobs, strict=True))
    ranks = {token: score.rank, **{other: rank for rank, other in enumerate(values, 1)}}
    shown = [token, *(other for other in list(values)[:num_top] if other != token)]
    return {
        other: Logprob(values.get(other, score.logprob), ranks.get(other), token_name(table, other)) for other in shown
    }
