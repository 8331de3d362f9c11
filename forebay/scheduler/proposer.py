"""Who guesses tokens ahead of the model, as far as the scheduler knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forebay.memory.slots import Ids
from forebay.requests.request import Request, blamed_on
from forebay.scheduler.grammars import Constraints


class Proposer(Protocol):
    """Guesses on the host what requests generate next. What it says costs time at most, never a token."""

    def propose(self, req: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of `req`, all of which are known."""
        ...

    def ended(self, req: Request) -> None:
        """The request has ended, or begins anew."""
        ...


def draft_tokens(
    proposer: Proposer | None, reqs: Sequence[Request], most: Ids, constraints: Constraints
) -> tuple[Ids, list[int]]:
    """How many draft tokens each request gets, at most `most` of it, and the tokens, where they are guessed here; where
    they are not, each gets as many as it may, but none under a grammar: what may follow a guess is asked here."""
    tokens: list[int] = []
    counts = np.zeros(len(reqs), dtype=np.int64)
    for i, (req, count) in enumerate(zip(reqs, most.tolist(), strict=True)):
        if count > 0 and proposer:
            with blamed_on(req):
                proposed = constraints.guessed(req, proposer.propose(req, count), count)
                tokens += proposed
            count = len(proposed)
        elif req.params.grammar:
            count = 0
        counts[i] = max(count, 0)
    return counts, tokens
