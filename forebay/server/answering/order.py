"""How every choice of a request is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forebay.requests.sampling_params import RANDOM_SEED, Grammar, SamplingParams, seed_of_choice
from forebay.requests.transfers import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How every choice of a request is made: `params.n` of each prompt, with seeds of their own."""

    params: SamplingParams
    namespace: str
    author: str  # whose prompts the answer may tell of
    tenant: str = ""  # whose share of the engine it uses
    priority: int = 0
    halves: Sequence[Rendezvous | None] = ()  # in a role: where the other half of each prompt's choices is
    seed: int = RANDOM_SEED
    keep_token_ids: bool = False  # the answer has those of its output
    discard_output: bool = False  # only the prompt's log-probabilities are wanted

    def params_of(self, number: int, grammar: Grammar | None = None) -> SamplingParams:
        """Choice `number` of a prompt: the user's seed, or one derived from it, so that choices differ and repeat. A
        prompt's own grammar comes before that of all."""
        grammar = grammar or self.params.grammar
        return msgspec.structs.replace(self.params.of_tokens(), seed=seed_of_choice(self.seed, number), grammar=grammar)
