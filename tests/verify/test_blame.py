"""C28: the settings that change an answer together are found among others, in few runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import combinations

import pytest

from forebay.cli.verify_engine import blame_lines
from forebay.verify.blame import MOST_RUNS, Blame, blame
from forebay.verify.circumstances import PLANTED, Flags, Room, circumstances
from forebay.verify.run import Outcome
from forebay.verify.verdict import Verdict
from tests.verify.test_verify import QUESTION

SETTINGS = ("little memory", "prefix cache", "graphs", "chunks", "steps ahead", "drafts", "host copies", "two tiers")


class Runner:
    """A circumstance whose answers differ if it has all `planted` settings. Notes the `runs`."""

    def __init__(self, planted: set[str]) -> None:
        self.planted, self.runs = planted, list[tuple[str, ...]]()

    async def differs(self, settings: Sequence[str]) -> bool:
        self.runs.append(tuple(settings))
        return self.planted <= set(settings)


@pytest.mark.parametrize("pair", [*combinations(SETTINGS, 2)])
async def test_blame_is_right_for_each_planted_pair_within_its_runs(pair: tuple[str, str]) -> None:
    runner = Runner(set(pair))
    assert await blame(SETTINGS, runner.differs) == Blame(pair, True, len(runner.runs))
    assert len(runner.runs) <= MOST_RUNS


@pytest.mark.parametrize("planted", [(), *((name,) for name in SETTINGS), SETTINGS[:1] + SETTINGS[-1:]])
async def test_blame_finds_one_setting_or_none_and_runs_no_set_twice(planted: tuple[str, ...]) -> None:
    runner = Runner(set(planted))
    assert await blame(SETTINGS, runner.differs) == Blame(planted, True, len(runner.runs))
    assert len({*map(frozenset, runner.runs)}) == len(runner.runs) <= MOST_RUNS
    assert set(SETTINGS) not in map(set, runner.runs), "of them all it is known"


@pytest.mark.parametrize("most", range(6))
async def test_blame_without_enough_runs_names_what_is_left(most: int) -> None:
    runner = Runner({"prefix cache", "chunks", "two tiers"})
    found = await blame(SETTINGS, runner.differs, most)
    assert not found.is_smallest
    assert runner.planted < set(found.settings)
    assert found.num_runs == len(runner.runs) == most


def test_command_that_repeats_a_difference_replaces_what_was_chosen_and_overwrites_no_report() -> None:
    found = Outcome("all of it", Verdict.DIFFERENT, "", blame=Blame(("chunks",), True, 3))
    words = ["./model", "--only", "all", "--report=a.md", "-n", "8", "--json", "--at-least", "3", "--dtype=float32"]
    for _ in range(2):
        *_, line = blame_lines(found, words)
        assert line == "again: forebay verify ./model -n 8 --dtype=float32 '--only=all of it' --settings=chunks"
        words = shlex.split(line)[3:]  # as it is typed again


@pytest.mark.parametrize("drafts", [PLANTED, {"speculative_algorithm": "STANDALONE"}])
def test_no_circumstance_has_more_settings_than_a_pair_is_found_among(drafts: Flags) -> None:
    found = circumstances(Room([QUESTION], 16), drafts, 2, {"enable_hisparse": True})
    assert max(len(one.settings) for one in found) <= len(SETTINGS)
