"""Requests whose tokens a grammar constrains, as far as the scheduler knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from forebay.base.errors import EngineError, ForebayError, InvalidRequest
from forebay.base.parts import Mask
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Request
from forebay.scheduler.journal import Compiled, Journal
from forebay.scheduler.step_draft import StepDraft


class Grammars(Protocol):
    """The grammars of requests. Each call first reads the tokens that were appended to the request since the last one,
    so commits and retractions need no call."""

    def begin(self, req: Request) -> None:
        """Begin the grammar of a request at the start of its output, perhaps once more."""
        ...

    def ready(self, req: Request) -> bool:
        """Return whether the grammar is compiled; it then stays so. Raises InvalidRequest if it cannot be compiled."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until one of those that are not compiled may be."""
        ...

    def drafts(self, req: Request, drafts: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that the grammar forces next, or else the allowed drafts; no stop token."""
        ...

    def fill(self, step: int, wanted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Begin to compute, for the sampler of this step, which tokens may follow the tokens of each request, and each
        of its draft tokens."""
        ...

    def error(self, req: Request) -> EngineError | None:
        """Why nothing may follow."""
        ...

    def ended(self, req: Request) -> None:
        """Free the matcher of a finished request."""


class Constraints:
    """The living requests with a grammar, by id, and those among them whose grammar is not compiled yet."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self.living: dict[int, Request] = {}
        self.unready: dict[int, Request] = {}

    @property
    def grammars(self) -> Grammars:
        """Compiler and matchers; some request with a grammar must have been admitted."""
        assert self._grammars is not None, "nobody with a grammar was let in"
        return self._grammars

    def begin(self, req: Request) -> None:
        """Start to compile the request's grammar; InvalidRequest if the engine has no grammar support."""
        if self._grammars is None:
            raise InvalidRequest("this engine knows no grammars: leave it out", param="grammar")
        self._grammars.begin(req)
        self.living[req.id] = self.unready[req.id] = req

    def ended(self, req: Request) -> None:
        """Drop a finished request that had a grammar."""
        del self.living[req.id]
        self.unready.pop(req.id, None)
        self.grammars.ended(req)

    def refused(self, journal: Journal | None = None) -> Iterator[tuple[Request, ForebayError]]:
        """Update which grammars are compiled; yield the requests whose grammar cannot be used, with the error."""
        for req in list(self.unready.values()):
            refused: ForebayError | None = None
            try:
                if not self.grammars.ready(req):
                    continue
                del self.unready[req.id]
            except ForebayError as error:
                refused = error
            if journal is not None:
                journal(Compiled(req.id, refused is not None))
            if refused is not None:
                yield req, refused

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a grammar that is being compiled; return at once if none is."""
        if self.unready:
            self.grammars.wait(timeout_s)

    def blocked_rows(self, reqs: Sequence[Request], in_flight: Iterable[Sequence[Request]]) -> Mask:
        """Mark the requests whose next token cannot be decided yet: the last one is on its way, or the grammar is not
        compiled."""
        flying = {req.id for flight in in_flight for req in flight if req.id in self.living}
        return np.array([req.id in flying or req.id in self.unready for req in reqs], dtype=np.bool_)

    def allowed_drafts(self, req: Request, drafts: Sequence[int], most: int) -> Sequence[int]:
        """Return the draft tokens that the request's grammar allows; all of them without a grammar."""
        return self.grammars.drafts(req, drafts, most) if req.id in self.living else drafts

    def error(self, req: Request) -> EngineError | None:
        """Return the error that ends the request; None if it has no grammar or its matcher works."""
        return self.grammars.error(req) if req.id in self.living else None

    def fill(self, draft: StepDraft, decoding: Sequence[Request]) -> Ids:
        """Begin to compute the allowed tokens at each position that is sampled under a grammar. Return the indices of
        these sequences in the step."""
        chunks, counts = draft.chunks, [0] * len(decoding) if draft.num_drafts is None else draft.num_drafts.tolist()
        wanted: list[tuple[Request, Sequence[int]]] = []
        seqs, first = [], 0
        for i, (req, _, stop) in enumerate(chunks):
            if req.id in self.living and stop == req.allocation.extend_target:
                seqs.append(i)
                wanted.append((req, ()))
        for i, (req, count) in enumerate(zip(decoding, counts, strict=True), len(chunks)):
            if req.id in self.living:
                seqs.append(i)
                wanted.append((req, draft.draft_tokens[first : first + count]))
            first += count
        if not wanted:
            return NO_IDS
        self.grammars.fill(draft.step, wanted)
        return np.array(seqs, dtype=np.int64)
