"""Which tokens a request may not have, said once more: of the token list alone, without a device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from random import Random

import numpy as np
from msgspec.structs import replace

from forebay.requests.sampling_params import SamplingParams
from tests.simulation.hashing import I64


class Restricted:
    """What may follow an output, of which `read` hears; `stop_ids` end it."""

    def __init__(
        self, params: SamplingParams, vocab: int, stop_ids: Collection[int], output: Sequence[int] = ()
    ) -> None:
        self._params, self._stop_ids, self.output = params, frozenset(stop_ids), list(output)
        self._known = params.allowed_token_ids or range(vocab)

    def read(self, token: int) -> None:
        self.output.append(token)

    def behind(self, drafts: Sequence[int]) -> Restricted:
        """Where these have followed as well."""
        other = copy(self)
        other.output = [*self.output, *drafts]
        return other

    @property
    def allowed(self) -> I64:
        return np.array([token for token in self._known if self._may_come(token)])

    def _may_come(self, token: int) -> bool:
        if len(self.output) < self._params.min_tokens and token in self._stop_ids:
            return False
        said = (*self.output, token)
        return not any(said[-len(word) :] == word for word in self._params.bad_words)


def restricted(rng: Random, params: SamplingParams, vocab: int) -> SamplingParams:
    """These with restrictions that always leave a token."""
    left = rng.choice([token for token in range(vocab) if token not in params.stop_token_ids])
    others = [token for token in range(min(vocab, 4)) if token != left]
    words = [(*rng.choices(range(min(vocab, 4)), k=rng.randrange(3)), rng.choice(others)) for _ in range(3)]
    allowed = {left, *rng.sample(range(vocab), min(vocab, 6))}
    return replace(
        params,
        min_tokens=rng.randint(0, params.max_tokens),
        allowed_token_ids=tuple(sorted(allowed)) if rng.random() < 0.5 else (),
        bad_words=tuple(words),
    )
