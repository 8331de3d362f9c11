"""Who proposes draft tokens in a simulation: what the reference will say, or something else, by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import SamplingParams
from tests.simulation.grammars import Matcher
from tests.simulation.hashing import Generated, HashModel, Matches, seed_of
from tests.simulation.liveness import require
from tests.simulation.restricted import Restricted


def reference(model: HashModel, prompt: Sequence[int], params: SamplingParams, *, salt: int) -> Iterator[Generated]:
    matcher: Matches | None = Matcher(params, model.vocab) if params.grammar else None
    if params.restricts:
        matcher = Restricted(params, model.vocab, params.stop_token_ids)
    return model.generate(prompt, salt=salt, seed=seed_of(params), matcher=matcher)


class References:
    """What the model says after each request's prompt, as far as somebody has asked; by request id, and also of those
    that have ended."""

    def __init__(self, model: HashModel) -> None:
        self.vocab = model.vocab
        self._model = model
        self._known: dict[int, list[int]] = {}
        self._more: dict[int, Iterator[Generated]] = {}

    def add(self, request_id: int, prompt: Sequence[int], params: SamplingParams, *, salt: int) -> None:
        self._known[request_id] = list(prompt)
        self._more[request_id] = reference(self._model, prompt, params, salt=salt)

    def tokens(self, request_id: int, start: int, stop: int) -> list[int]:
        """The request's tokens at positions [start, stop)."""
        known, more = self._known[request_id], self._more[request_id]
        while len(known) < stop:
            known.append(next(more).token_id)
        return known[start:stop]


class DeviceProposer:
    """Right up to a place that chance decides, and wrong there; or `right` so often and then wrong."""

    def __init__(self, rng: Random, references: References) -> None:
        self._rng, self._references = rng, references
        self._chance = rng.choice([0.1, 0.3, 0.6])
        self.right: int | None = None

    def __call__(self, request_id: int, start: int, count: int) -> list[int]:
        """`count` tokens for the positions from `start` on."""
        vocab, at = self._references.vocab, self._first_wrong(count)
        tokens = self._references.tokens(request_id, start, start + count)
        if at < count:
            tokens[at] = (tokens[at] + self._rng.randrange(1, vocab)) % vocab
        return tokens

    def _first_wrong(self, count: int) -> int:
        if self.right is not None:
            return self.right
        rng = self._rng
        return count if rng.random() < self._chance else rng.choice([0, rng.randrange(count)])


class HostProposer:
    """The same for a scheduler that asks: by `shy` fewer than it could use, or none. It forgets who has ended."""

    def __init__(self, rng: Random, propose: DeviceProposer) -> None:
        self._rng, self._propose = rng, propose
        self.shy = 0.3
        self.known: set[int] = set()

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        require(req.status is Status.DECODING, f"drafts are wanted for {req}")
        self.known.add(req.id)
        count = self._rng.randint(0, most) if self._rng.random() < self.shy else most
        return self._propose(req.id, len(req.tokens), count) if count else ()

    def ended(self, req: Request) -> None:
        require(req.status in (Status.FINISHED, Status.WAITING), f"{req} goes on with its tokens")
        self.known.discard(req.id)
