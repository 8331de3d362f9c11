"""/generate: texts with what is known of them in `meta_info`; in a stream each event has all of a text so far."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice, Piece
from forebay.engine.scores import Scored, token_name
from forebay.requests.step_plan import TokenLogprob
from forebay.server.answering.generation import Generation
from forebay.server.dialects.dialect import Dialect
from forebay.server.http.errors import DONE, error_ending
from forebay.text.answers.parts import Part
from forebay.text.token_bytes import TokenBytes

_encode: Final = msgspec.json.Encoder().encode


class NativeDialect(Dialect):
    """`num_top` is None where no log-probabilities are wanted; `names` puts the tokens' texts into them. `many`: the
    answer is a list."""

    def __init__(self, answer_id: str, table: TokenBytes, *, num_top: int | None, names: bool, many: bool) -> None:
        self._id = answer_id
        self._table = table
        self._num_top = num_top
        self._names = names
        self._many = many
        self._started = time.monotonic()
        self._texts: dict[int, list[str]] = {}  # of a stream, by choice
        self._scores: dict[int, list[Scored]] = {}

    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        answers = [self._answer(*one) for one in zip(generation.choices, texts, scores, strict=True)]
        return _encode(answers if self._many else answers[0])

    def opening(self, generation: Generation) -> bytes:
        return b""

    def text(self, choice: Choice, text: str) -> bytes:
        return self.chunk(choice, Piece(text, [], None))

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish):
            return b""
        texts = self._texts.setdefault(choice.index, [])
        texts.append(piece.text)
        scores = self._scores.setdefault(choice.index, [])
        scores += piece.tokens
        number = {"index": choice.index} if self._many else {}
        return b"data: %b\n\n" % _encode({**self._answer(choice, "".join(texts), scores), **number})

    def closing(self, generation: Generation) -> bytes:
        return DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _answer(self, choice: Choice, text: str, scores: list[Scored]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": f"{self._id}-{choice.index}" if self._many else self._id,
            "finish_reason": _finish(choice),
            "prompt_tokens": len(choice.prompt.token_ids),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.cache.cached_tokens,
            "weight_version": choice.weight_version,
            "e2e_latency": time.monotonic() - self._started,
        }
        if self._num_top is None:
            return {"text": text, "meta_info": meta}
        known = [(token.token_id, token.score) for token in scores if token.score is not None]
        meta["output_token_logprobs"] = [self._entry(token, score.logprob) for token, score in known]
        if self._num_top:
            meta["output_top_logprobs"] = [self._top(score) for _, score in known]
        return {"text": text, "output_ids": [token for token, _ in known], "meta_info": meta}

    def _top(self, score: TokenLogprob) -> list[list[Any]]:
        pairs = zip(score.top_ids, score.top_logprobs, strict=True)
        return [self._entry(token, value) for token, value in pairs][: self._num_top]

    def _entry(self, token: int, logprob: float) -> list[Any]:
        return [logprob, token, token_name(self._table, token) if self._names else None]


def _finish(choice: Choice) -> dict[str, Any] | None:
    match choice.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": choice.stopped}
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case other:
            return {"type": other}
