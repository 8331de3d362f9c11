"""Planted drafts: each is a known answer with one wrong token, and the place of that token changes."""

from __future__ import annotations

import pytest

from forebay.config.engine_config import KnownAnswer
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.speculation.planted import Planted

PROMPT = (7, 8)
ANSWER = KnownAnswer(prompt=PROMPT, tokens=tuple(range(100, 140)), alternatives=tuple(range(200, 240)))


def request(id: int, output: tuple[int, ...] = (), prompt: tuple[int, ...] = PROMPT) -> Request:
    req = Request(id, prompt, SamplingParams(max_tokens=64))
    req.tokens.extend(output)
    return req


@pytest.mark.parametrize("most", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("id", [0, 1, 6])
def test_planted_drafts_of_one_request_are_accepted_up_to_each_length(id: int, most: int) -> None:
    """Verification keeps what is right of a draft, and adds the token behind it. One turn has no draft."""
    proposer, lengths = Planted([KnownAnswer(prompt=PROMPT, tokens=(5,) * 400, alternatives=(6,) * 400)]), []
    req = request(id, (5,))
    for _ in range(most + 2):
        draft = list(proposer.propose(req, most))
        if not draft:
            lengths.append(-1)
            req.tokens.append(5)
            continue
        assert len(draft) == most
        accepted = draft.index(6) if 6 in draft else most
        assert draft == [5] * accepted + [6] * (accepted < most) + [5] * (most - accepted - 1)
        lengths.append(accepted)
        req.tokens.extend([5] * (accepted + 1))
    assert sorted(lengths) == list(range(-1, most + 1))


def test_planted_draft_ends_with_the_answer() -> None:
    proposer = Planted([ANSWER])
    assert list(proposer.propose(request(7, ANSWER.tokens[:37]), 7)) == [137, 138, 139]
    assert list(proposer.propose(request(15, ANSWER.tokens), 7)) == []


def test_planted_draft_is_empty_for_other_prompts_and_outputs() -> None:
    proposer = Planted([ANSWER])
    assert not proposer.propose(request(1, (), (7, 8, 9)), 3)
    assert not proposer.propose(request(2, (100, 999)), 3)


def test_planted_draft_continues_the_answer_that_begins_like_the_output() -> None:
    other = KnownAnswer(prompt=PROMPT, tokens=(100, 50, 51), alternatives=(0, 0, 0))
    proposer = Planted([ANSWER, other])
    assert list(proposer.propose(request(3, (100, 50)), 1)) == [0]
    assert list(proposer.propose(request(6, (100, 101)), 1)) == [202]


def test_planted_proposer_forgets_requests_that_end() -> None:
    proposer, req = Planted([ANSWER]), request(0)
    first = [list(proposer.propose(req, 3)) for _ in range(3)]
    proposer.ended(req)
    proposer.ended(req)
    assert [list(proposer.propose(req, 3)) for _ in range(3)] == first
