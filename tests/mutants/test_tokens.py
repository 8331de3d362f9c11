"""The mechanical test of whether a mutant changes a token."""

from __future__ import annotations

from tests.mutants import tokens

SOURCE = """\
def _take_token(self, token):
    if token != self.right:
        raise Violation("another token")

def turn(self):
    require(self.tick(), "nothing runs")
    if self.free:
        raise RunnerError("reads a free page")
    raise StepFailed("injected")
"""


def test_simulators_lose_their_checks_but_those_of_tokens() -> None:
    assert tokens.unchecked(SOURCE) == SOURCE.replace('require(self.tick(), "nothing runs")', "self.tick()").replace(
        'raise RunnerError("reads a free page")', "pass"
    ).replace('"', "'").strip("\n")


def test_first_seed_that_changes_an_answer_is_named() -> None:
    def run(seed: int) -> None:
        if seed == 3:
            raise ValueError("token 1 is 8")

    assert tokens.first_change(range(6), [run, run]) == "seed 3: ValueError: token 1 is 8"
    assert tokens.first_change(range(3), [run]) == ""
