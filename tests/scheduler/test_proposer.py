"""Which requests get draft tokens, and under whose control (C16, C17)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, Pooling, PoolingKind, SamplingParams
from forebay.scheduler.admission import NewTokenRatio
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.proposer import draft_tokens

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def request(request_id: int, **params: object) -> Request:
    return Request(request_id, [1, 2, 3], SamplingParams(**params))  # type: ignore[assignment]


class Constraints:
    """Allows the first of each request's guesses, if it has a grammar."""

    living = range(10)

    def allowed_drafts(self, req: Request, guesses: list[int], most: int) -> list[int]:
        return guesses[:1] if req.params.grammar else guesses


def test_draft_tokens_on_the_device_none_under_a_grammar() -> None:
    reqs = [request(1), request(2, grammar=GRAMMAR), request(3)]
    counts, tokens = draft_tokens(None, reqs, np.array([3, 3, 0]), Constraints())  # type: ignore[assignment]
    assert (counts.tolist(), tokens) == ([3, 0, 0], [])


def test_draft_tokens_on_the_host_are_what_the_grammar_allows() -> None:
    proposer = SimpleNamespace(begin_step=lambda num: None, propose=lambda req, most: [req.id * 10] * most)
    reqs = [request(1), request(2, grammar=GRAMMAR), request(3)]
    counts, tokens = draft_tokens(proposer, reqs, np.array([2, 2, 0]), Constraints())  # type: ignore[assignment]
    assert (counts.tolist(), tokens) == ([2, 1, 0], [10, 10, 20])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, True),
        ({"prompt_logprobs": 1}, False),
        ({"pooling": Pooling(PoolingKind.MEAN)}, False),
        ({"pooling": Pooling(PoolingKind.CLS)}, False),
    ],
)
def test_suspend_request_that_sees_every_hidden_state_computes_its_prompt_again(
    params: dict[str, object], kept: bool
) -> None:
    """C26: a host copy has KV, and not the hidden states that a mean has summed up."""
    saved: list[object] = []
    allocator = SimpleNamespace(offload=lambda allocation: saved.append(allocation) or True)
    memory = SimpleNamespace(allocator=allocator)
    queues = SimpleNamespace(
        remove=lambda req: None, requeue=lambda req: None, memory=memory, counters={"retractions_kept": 0}
    )
    pooled = params.get("pooling")
    req = Request(1, [1, 2, 3], SamplingParams.of_pooling(pooled) if pooled else SamplingParams(**params))
    req.maybe_allocation = SimpleNamespace()  # type: ignore[assignment]
    Preemption(queues, Handoff(), NewTokenRatio(1.0)).suspend(req)  # type: ignore[assignment]
    assert bool(saved) is kept
