"""A survey of the prefix cache in parts: what it keeps of the past, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.engine.frames import GetTree
from forebay.engine.loop import surveys
from forebay.engine.loop.surveys import MAX_NOTES, MAX_PARTS, NODES_PER_PART, Surveys


class Cache:
    """A cache with a clock and `num_nodes` nodes, of which the survey yields nothing but their ages."""

    def __init__(self, num_nodes: int = 0) -> None:
        self.clock, self.num_nodes = 0, num_nodes
        self.kinds = [SimpleNamespace(name="kv")]
        self.index = SimpleNamespace()
        self.idle_s: Callable[[int], float] = lambda used: 0.0

    def survey(self, cache: object, secret: bytes, idle_s: Callable[[int], float]) -> Iterator[None]:
        self.idle_s = idle_s
        yield from (None for _ in range(self.num_nodes))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Surveys, Cache]]:
    def make(num_nodes: int = 0) -> tuple[Surveys, Cache]:
        cache: Any = Cache(num_nodes)
        monkeypatch.setattr(surveys, "survey", cache.survey)
        return Surveys(cache), cache

    return make


def test_survey_age_is_from_the_first_note_behind_a_use(made: Callable[..., tuple[Surveys, Cache]]) -> None:
    survey, cache = made()
    for clock, now in ((10, 1.0), (20, 2.0), (20, 2.5), (30, 4.0)):
        cache.clock = clock
        survey.note(now)
    survey.part(GetTree(serial=1, begin=True), 9.0)
    ages = {used: cache.idle_s(used) for used in (1, 10, 11, 20, 29, 30, 31)}
    assert ages == {1: 8.0, 10: 8.0, 11: 7.0, 20: 7.0, 29: 5.0, 30: 5.0, 31: 0.0}
    survey.part(GetTree(serial=2, begin=True), 3.0)  # a clock that was set back
    assert cache.idle_s(30) == 0.0


def test_survey_notes_are_bounded_and_the_newest_are_kept(made: Callable[..., tuple[Surveys, Cache]]) -> None:
    survey, cache = made()
    for i in range(3 * MAX_NOTES):
        cache.clock = i + 1
        survey.note(float(i))
        assert len(survey._clocks) == len(survey._times) <= MAX_NOTES
    assert len(survey._clocks) >= MAX_NOTES // 2
    survey.part(GetTree(serial=1, begin=True), 3.0 * MAX_NOTES)
    assert cache.idle_s(cache.clock) == 1.0


@pytest.mark.parametrize("num_nodes", [0, 1, NODES_PER_PART - 1, NODES_PER_PART, 2 * NODES_PER_PART + 5])
def test_survey_ends_with_the_last_node(made: Callable[..., tuple[Surveys, Cache]], num_nodes: int) -> None:
    survey, _ = made(num_nodes)
    parts = [survey.part(GetTree(serial=0, begin=True), 0.0)]
    while parts[-1].more:
        parts.append(survey.part(GetTree(serial=len(parts), begin=False), 0.0))
    assert len(parts) == num_nodes // NODES_PER_PART + 1
    assert [part.is_cut for part in parts] == [True] * (len(parts) - 1) + [False]


def test_survey_of_a_tree_without_end_is_cut(made: Callable[..., tuple[Surveys, Cache]]) -> None:
    survey, _ = made(2 * MAX_PARTS * NODES_PER_PART)
    parts = [survey.part(GetTree(serial=0, begin=True), 0.0)]
    while parts[-1].more:
        parts.append(survey.part(GetTree(serial=0, begin=False), 0.0))
    assert len(parts) == MAX_PARTS
    assert parts[-1].is_cut
