"""Who proposes draft tokens in a simulation: what the reference will say, or something else, by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import SamplingParams
from forebay.speculation.adaptive import Widths
from forebay.speculation.ngram import Ngram
from tests.simulation.grammars import Matcher
from tests.simulation.hashing import NO_ROWS, Generated, HashModel, Matches, Rows, seed_of
from tests.simulation.liveness import require
from tests.simulation.restricted import Restricted


def reference(
    model: HashModel, prompt: Sequence[int], params: SamplingParams, *, salt: int, rows: Rows = NO_ROWS
) -> Iterator[Generated]:
    matcher: Matches | None = Matcher(params, model.vocab) if params.grammar else None
    if params.restricts:
        matcher = Restricted(params, model.vocab, params.stop_token_ids)
    return model.generate(prompt, salt=salt, seed=seed_of(params), matcher=matcher, rows=rows)


class References:
    """What the model says after each request's prompt, as far as somebody has asked; by request id, and also of those
    that have ended."""

    def __init__(self, model: HashModel) -> None:
        self.vocab = model.vocab
        self._model = model
        self._known: dict[int, list[int]] = {}
        self._more: dict[int, Iterator[Generated]] = {}

    def add(
        self, request_id: int, prompt: Sequence[int], params: SamplingParams, *, salt: int, rows: Rows = NO_ROWS
    ) -> None:
        self._known[request_id] = list(prompt)
        self._more[request_id] = reference(self._model, prompt, params, salt=salt, rows=rows)

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
    """`Ngram`, each of whose drafts must have stood somewhere; and by `made_up`, where it has none, or by chance, the
    same as a device's. By `shy` it proposes fewer than are wanted, or none. It forgets who has ended."""

    def __init__(
        self, rng: Random, propose: DeviceProposer, references: References, options: SpeculationOptions
    ) -> None:
        self._rng, self._propose, self._references = rng, propose, references
        self.ngram, self.sources = Ngram(options), Sources(options)
        self.shy, self.made_up = 0.3, rng.choice([0.0, 0.3, 0.7])
        self.known: set[int] = set()
        self.num_found = self.num_right = 0

    def begin_step(self, num_requests: int) -> None:
        self.ngram.begin_step(num_requests)

    def propose(self, req: Request, most: int) -> Sequence[int]:
        require(req.status is Status.DECODING, f"drafts are wanted for {req}")
        self.known.add(req.id)
        count = self._rng.randint(0, most) if self._rng.random() < self.shy else most
        if not count:
            return ()
        found = self.ngram.propose(req, count)
        self.sources.check(req, found, count)
        if self._rng.random() < self.made_up:
            return self._propose(req.id, len(req.tokens), count)
        self._count(req, found)
        return found

    def _count(self, req: Request, found: Sequence[int]) -> None:
        right = self._references.tokens(req.id, len(req.tokens), len(req.tokens) + len(found))
        wrong = next((at for at, (a, b) in enumerate(zip(found, right, strict=True)) if a != b), len(found))
        self.num_found += len(found)
        self.num_right += wrong

    def ended(self, req: Request) -> None:
        require(req.status in (Status.FINISHED, Status.WAITING), f"{req} goes on with its tokens")
        self.known.discard(req.id)
        self.ngram.ended(req)
        self.sources.ended(req)

    def check_drained(self) -> None:
        require(not self.known, f"whoever proposes drafts was not told that requests {self.known} have ended")
        require(not self.ngram._readers, f"requests {[*self.ngram._readers]} have ended and are not forgotten")


@dataclass(slots=True)
class _Output:
    namespace: str
    tokens: list[int]
    gone: int | None = None  # with which end


class Sources:
    """What drafts may come from: a request's own tokens, and the outputs of its namespace that ended last."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._capacity, self._depth = options.ngram_capacity, options.ngram_max_trie_depth
        self._outputs: list[_Output] = []
        self._num_ended = 0
        self._since: dict[int, int] = {}  # how many had ended when a request was first asked about

    def ended(self, req: Request) -> None:
        self._since.pop(req.id, None)
        output = req.tokens[req.num_prompt :].tolist()[-self._capacity :]
        self._num_ended += 1
        if len(output) > 2:
            self._outputs.append(_Output(req.cache_namespace, output))
        left = self._capacity
        for kept in reversed(self._outputs):
            left -= len(kept.tokens)
            if left < 0 and kept.gone is None:
                kept.gone = self._num_ended

    def check(self, req: Request, draft: Sequence[int], most: int) -> None:
        """`draft` follows the request's last token in its own tokens, or its last two in an output. A match goes on in
        an output that has gone since."""
        draft, own = list(draft), req.tokens.tolist()
        since = self._since.setdefault(req.id, self._num_ended)
        require(len(draft) <= min(most, self._depth), f"{req} wants {most} drafts and gets {draft}")
        if draft and not self._repeats(own, draft):
            there = [its for its in self._outputs if its.gone is None or its.gone > since]
            texts = [its.tokens for its in there if its.namespace == req.cache_namespace]
            found = any(_follows(own[-2:], text, draft) for text in texts)
            require(found, f"{draft} never stood behind the last tokens of {req}, {own}")

    def _repeats(self, own: list[int], draft: list[int]) -> bool:
        """What reaches up to the end goes on from where it began."""
        places = (at for at in range(1, len(own)) if own[at - 1] == own[-1])
        return any((own[at:] * len(draft))[: len(draft)] == draft for at in places)


def _follows(last: list[int], text: list[int], draft: list[int]) -> bool:
    wanted = last + draft
    return len(last) == 2 and any(text[at : at + len(wanted)] == wanted for at in range(len(text)))


class RandomWidths(Widths):
    """Any of the widths, and sometimes the one that pays; or the `fixed` one."""

    def __init__(self, options: SpeculationOptions, rng: Random) -> None:
        super().__init__(options)
        self._rng = rng
        self.fixed: int | None = None

    def width(self, num_running: int) -> int:
        wanted = super().width(num_running)
        self.current = self.fixed or (wanted if self._rng.random() < 0.2 else self._rng.choice(self._widths))
        return self.current
