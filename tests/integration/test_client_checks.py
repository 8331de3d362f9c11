"""What the runs of clients hold: a retry, a refusal, a missing turn and a prompt that begins anew are each found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.clients.command_line import AGENTS
from tests.integration.clients.recorder import Exchange, Recorder
from tests.integration.test_coding_agents import BEGUN, check_exchanges

TURNS = [f"{'x' * (BEGUN * number)}" for number in range(2, 5)]  # each prompt goes on from the one before


class Passed(Recorder):
    """A recorder through which these exchanges have passed."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.exchanges = exchanges


def exchanges(route: str, *changes: dict[str, Any]) -> list[Exchange]:
    """Return an exchange for each turn, and one more for each of `changes`, which is the last one with other fields."""
    path = f"{route}?beta=true"
    passed = [Exchange("POST", path, str(number).encode(), 200, b"") for number in range(len(TURNS))]
    fields = {"method": "POST", "path": path, "body": passed[-1].body, "status": 200, "answer": b""}
    return passed + [Exchange(**{**fields, **change}) for change in changes]


@pytest.mark.parametrize("name", AGENTS)
def test_run_without_a_retry_passes_and_each_fault_of_one_is_found(name: str) -> None:
    agent = AGENTS[name].__new__(AGENTS[name])  # needs no installation
    check_exchanges(Passed(exchanges(agent.route)), agent, TURNS, len(TURNS))
    faults = {
        "retry": (exchanges(agent.route, {}), TURNS, len(TURNS)),
        "refusal": (exchanges(agent.route, {"body": b"9", "status": 500}), TURNS, len(TURNS)),
        "missing turn": (exchanges(agent.route), TURNS, len(TURNS) + 1),
        "prompt that begins anew": (exchanges(agent.route), [*TURNS[:2], "y" + TURNS[2]], len(TURNS)),
    }
    passed = []
    for fault, (through, prompts, num_turns) in faults.items():
        try:
            check_exchanges(Passed(through), agent, prompts, num_turns)
        except AssertionError:
            continue
        passed.append(fault)
    assert passed == []


@pytest.mark.parametrize("name", AGENTS)
def test_log_of_a_client_that_tells_of_a_retry_or_an_error_is_found(name: str) -> None:
    agent = AGENTS[name].__new__(AGENTS[name])  # needs no installation
    assert agent.complaints
    agent.log = "All done, step-9.\n"
    assert agent.complained() == []
    for word in agent.complaints:
        agent.log = f"working\n... {word} ...\nAll done, step-9.\n"
        assert agent.complained() == [f"... {word} ..."]
