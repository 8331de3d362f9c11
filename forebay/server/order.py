"""What is to be generated: prompts, how every choice is made, and how its answer is read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from forebay.requests.sampling_params import MAX_SEED, Grammar, SamplingParams
from forebay.requests.transfers import Rendezvous
from forebay.text.answers.reading import AnswerReader
from forebay.text.token_bytes import TokenBytes


class Reading(NamedTuple):
    """How answers to a prompt are read: by a reader each, from the bytes in `table`, to the end of the first call where
    there may be one alone. Thinking is told apart in any case, and told where that is wanted."""

    make: Callable[[], AnswerReader]
    table: TokenBytes
    one_call: bool
    tells_thinking: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is None where the client sent ids. Others are likely to go on from the first `resume_points` tokens. The
    answers are what `grammar` says, or what those to all prompts of the request must be."""

    token_ids: list[int]
    text: str | None = None
    resume_points: tuple[int, ...] = ()
    reading: Reading | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How every choice of a request is made: `params.n` of each prompt, with seeds of their own."""

    params: SamplingParams
    namespace: str
    author: str  # whose prompts the answer may tell of
    priority: int = 0
    halves: Sequence[Rendezvous | None] = ()  # in a role: where the other half of each prompt's choices is
    seed: int | None = None
    discard_output: bool = False  # only the prompt's log-probabilities are wanted

    def params_of(self, number: int, grammar: Grammar | None = None) -> SamplingParams:
        """Choice `number` of a prompt: the user's seed, or one derived from it, so that choices differ and repeat. A
        prompt's own grammar comes before that of all."""
        grammar = grammar or self.params.grammar
        return msgspec.structs.replace(self.params.of_tokens(), seed=_seed(self.seed, number), grammar=grammar)


def _seed(seed: int | None, number: int) -> int:
    if seed is None:
        return secrets.randbits(63)
    seed &= MAX_SEED
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") & MAX_SEED
