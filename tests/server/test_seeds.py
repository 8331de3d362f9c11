"""What an answer's draws are keyed by: the client's seed, or another one each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.families.base.sampling import SamplingDefaults
from tests.server.conftest import Running

Launch = Callable[..., Running]


def seeds(server: Running, **body: Any) -> list[int]:
    """Those that the engine got for one request of two prompts with two choices each."""
    before = len(server.engine.submitted)
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": ["hello", "world"], "n": 2, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return [stream.params.seed for stream in server.engine.submitted[before:]]


@pytest.mark.parametrize("body", [{}, {"seed": None}, {"seed": -1}])
def test_without_a_seed_every_choice_of_every_request_has_its_own(shared: Running, body: dict[str, Any]) -> None:
    drawn = seeds(shared, **body) + seeds(shared, **body)
    assert len(set(drawn)) == 8
    assert min(drawn) >= 0


@pytest.mark.parametrize("seed", [0, 7, -2, 2**63 - 1, -(2**63)])
def test_a_seed_repeats_its_choices_and_they_differ_from_each_other(shared: Running, seed: int) -> None:
    first = seeds(shared, seed=seed)
    assert first == seeds(shared, seed=seed)
    assert first[:2] == first[2:]  # a prompt's choices, whatever prompts are asked beside it
    assert len(set(first)) == 2


def test_operators_seed_is_the_seed_of_requests_that_say_none(launch: Launch) -> None:
    server = launch(sampling=SamplingDefaults({"seed": 7}, "the test"))
    assert seeds(server) == seeds(server) == seeds(server, seed=7)
    assert seeds(server, seed=8) != seeds(server)
    assert seeds(server, seed=-1) != seeds(server, seed=-1)
