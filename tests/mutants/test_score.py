"""The score of `forebay verify`: which mutants are drawn, and what counts as found."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from tests.mutants import MUTANTS, score
from tests.mutants.mutant import Mutant, Overlay, Stale
from tests.mutants.reached import Reached
from tests.mutants.silent import SILENT


def test_score_draws_the_same_mutants_of_the_engine_for_a_seed() -> None:
    found = score.drawn(MUTANTS, 3, 20)
    assert found == score.drawn(MUTANTS, 3, 20) != score.drawn(MUTANTS, 4, 20)
    assert {mutant.id for mutant in score.drawn(MUTANTS, 3, None)} >= {mutant.id for mutant in found}
    assert len({mutant.id for mutant in found}) == 20
    assert all(mutant.file.startswith(("memory/", "scheduler/", "runtime/")) for mutant in found)
    assert all(score.OF_TOKENS.intersection(mutant.contracts) for mutant in found)
    assert len(score.drawn(MUTANTS, None, None)) < len(MUTANTS)


class Everywhere(Reached):
    """All circumstances reach every statement."""

    def by(self, mutant: Mutant) -> set[str]:
        return {*self.names}


class FakeOverlay:
    """A copy of the package in which a run ends as given."""

    root = "nowhere"

    def __init__(self, ended: Any) -> None:
        self.ended = ended

    def changed(self, *change: Any) -> nullcontext[None]:
        if isinstance(self.ended, Stale):
            raise self.ended
        return nullcontext()

    def python(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(self.ended, Exception):
            raise self.ended
        return subprocess.CompletedProcess([], self.ended[0], self.ended[1], "")


@pytest.mark.parametrize(
    ("ended", "result"),
    [
        ((0, "\n"), "missed"),
        ((1, "alone\nretracted: different\n"), "retracted: different"),
        ((1, ""), "exit code 1"),
        ((-9, ""), "exit code -9"),
        (subprocess.TimeoutExpired([], 1), "hangs"),
        (Stale("gone"), "STALE gone"),
    ],
)
def test_score_counts_a_mutant_as_found_unless_every_circumstance_is_the_same(ended: Any, result: str) -> None:
    everywhere = Everywhere(["retracted"])
    assert score.outcome(Path(), everywhere, 2, cast(Overlay, FakeOverlay(ended)), MUTANTS[0]) == result


def test_score_mutant_that_nothing_reaches_is_missed_without_a_run() -> None:
    overlay = FakeOverlay(AssertionError("a run"))
    found = score.outcome(Path(), Everywhere([]), 2, cast(Overlay, overlay), MUTANTS[0])
    assert found == score.NOT_REACHED
    assert score.summary_of([found], 0).startswith("found by forebay verify: 0 of 1, 0 more")


def test_mutants_that_change_no_token_are_among_those_of_tokens() -> None:
    assert SILENT.keys() <= {mutant.rule for mutant in score.drawn(MUTANTS, None, None)}


def test_score_tries_a_mutant_on_a_model_that_has_what_it_is_about() -> None:
    families = {mutant.rule: score.family_of(mutant) for mutant in score.drawn(MUTANTS, None, None)}
    assert set(families.values()) == {*score.MODELS.values(), *score.ELSEWHERE.values()}
    assert families["C18 a window is held as long as a step can read it"] == "gpt_oss"
    assert families["C18 hits are whole pages"] == "gpt_oss"
    assert families.keys() >= score.ELSEWHERE.keys()
    assert families["C18 a load brings the state behind its prefix"] == "falcon_h1"


def test_score_model_that_another_drafts_for_is_asked_with_its_drafts() -> None:
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "models/llama"}
    assert score._drafts_for(Path("models/gpt_oss+llama")) == settings
    assert score._drafts_for(Path("models/gpt_oss")) == {}


def test_score_counts_hangs_and_stale_mutants_apart() -> None:
    results = ["missed", "hangs", "STALE gone", "retracted: different", "exit code 1"]
    assert score.summary_of(results, 7) == (
        "found by forebay verify: 2 of 4, 1 more by their time; 7 change no token, 1 are stale"
    )


def test_score_results_of_a_file_are_kept_between_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "score.txt")
    score.Results(path).add("C18 a rule | with a bar", "retracted: different")
    score.Results(path).add("C19 another one", score.MISSED)
    assert score.Results(path).of == {"C18 a rule | with a bar": "retracted: different", "C19 another one": "missed"}
    assert score.Results("").of == {}
