"""The scheduler's interface to proposers of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forebay.memory.pictures import Pictures
from forebay.memory.slots import Ids, as_ids
from forebay.requests.request import Request, RequestFault
from forebay.scheduler.grammars import Constraints


class Proposer(Protocol):
    """Drafts on the host what requests generate next. A wrong draft costs time, never a token."""

    def begin_step(self, num_requests: int) -> None:
        """The scheduler plans a step and asks about at most `num_requests` requests: bound the work by that."""
        ...

    def propose(self, req: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow those of `req`, all of which are known."""
        ...

    def ended(self, req: Request) -> None:
        """The request has ended, or begins anew."""
        ...


def _first_picture(pictures: Pictures, proposed: Sequence[int]) -> int | None:
    """Return the index of the first token of a picture: tokens behind it are no drafts."""
    places = np.flatnonzero(pictures.stand_for(np.array(proposed)))
    return int(places[0]) if len(places) else None


def draft_tokens(
    proposer: Proposer | None,
    reqs: Sequence[Request],
    most: Ids,
    constraints: Constraints,
    pictures: Pictures | None = None,
) -> tuple[Ids, list[int]]:
    """Return the number of draft tokens of each request, at most `most` of it, and the tokens if a proposer on the host
    drafts them. Otherwise each gets as many as it may, but none under a grammar, which checks drafts on the host."""
    if proposer is None:
        wanted = most.tolist()
        return as_ids([0 if req.params.grammar else max(n, 0) for req, n in zip(reqs, wanted, strict=True)]), []
    proposer.begin_step(len(reqs))
    propose, living = proposer.propose, constraints.living
    tokens: list[int] = []
    counts: list[int] = []
    for req, count in zip(reqs, most.tolist(), strict=True):
        if count <= 0:
            counts.append(0)
            continue
        try:  # what `blamed_on` does, without its 1 us
            proposed = propose(req, count)
            if pictures is not None and len(proposed):
                proposed = proposed[: _first_picture(pictures, proposed)]
            if req.id in living:
                proposed = constraints.allowed_drafts(req, proposed, count)
        except Exception as error:
            raise RequestFault(req) from error
        tokens += proposed
        counts.append(len(proposed))
    return as_ids(counts), tokens
