"""Random traffic of which most requests have a grammar, and bugs put there on purpose: what must be found, soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forebay.requests.request import Request
from forebay.scheduler.grammars import Constraints
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.queues import Queues
from tests.simulation import sleeping
from tests.simulation.event_log import Outcome
from tests.simulation.grammars import HashGrammars, Matcher
from tests.simulation.simulator import run_seed

PER_CHUNK = 10
QUICK = (10, 11, 14, 15)  # their traffic is of the kind that finds bugs; that of any seeds need not be
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 2000, PER_CHUNK)]
PER_MUTATION = 60  # seeds, and each is found sooner
SHARE = 0.7

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[apply.__name__] = apply
    return apply


@pytest.mark.long
@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c16_outputs_are_the_references_under_grammars_too(seeds: Sequence[int]) -> None:
    outcome = sum((run_seed(seed, SHARE) for seed in seeds), Outcome(seeds=0))
    if seeds is QUICK:
        assert outcome.retractions >= 2
        assert outcome.accepted >= 50
    for seed in seeds[:2]:
        sleeping.run_seed(seed, SHARE)


@mutation
def a_mask_is_anothers(patch: Patch) -> None:
    fill = HashGrammars.fill
    patch.setattr(HashGrammars, "fill", lambda self, step, wanted: fill(self, step, wanted[::-1]))


@mutation
def a_matcher_begins_again_with_a_retraction_and_reads_only_what_comes(patch: Patch) -> None:
    suspend = Preemption.suspend

    def mutated(self: Preemption, req: Request) -> None:
        suspend(self, req)
        if req.params.grammar:
            grammars = self._queues.constraints.grammars
            assert isinstance(grammars, HashGrammars)
            grammars.matchers[req.id] = Matcher(req.params, grammars._vocab)

    patch.setattr(Preemption, "suspend", mutated)


@mutation
def a_row_does_not_wait_for_its_last_token(patch: Patch) -> None:
    blocked_rows = Constraints.blocked_rows
    patch.setattr(Constraints, "blocked_rows", lambda self, reqs, in_flight: blocked_rows(self, reqs, ()))


@mutation
def the_mask_behind_a_draft_is_that_before_it(patch: Patch) -> None:
    fill = HashGrammars.fill

    def mutated(self: HashGrammars, step: int, wanted: Any) -> None:
        fill(self, step, wanted)
        masks, at = self._masks[step], 0
        for _, drafts in wanted:
            masks[at : at + 1 + len(drafts)] = [masks[at]] * (1 + len(drafts))
            at += 1 + len(drafts)

    patch.setattr(HashGrammars, "fill", mutated)


@mutation
def a_request_starts_before_its_grammar_is_compiled(patch: Patch) -> None:
    patch.setattr(Queues, "candidates", property(lambda self: self.waiting.of))


@mutation
def a_matcher_goes_on_where_its_output_begins_again(patch: Patch) -> None:
    begin = Constraints.begin

    def mutated(self: Constraints, req: Request) -> None:
        if req.id not in self.living:
            begin(self, req)

    patch.setattr(Constraints, "begin", mutated)


@pytest.mark.slow
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in range(PER_MUTATION):
        for run in (run_seed, sleeping.run_seed):
            try:
                run(seed, SHARE)
            except (TypeError, AttributeError, NameError):
                raise
            except Exception:
                return
    raise AssertionError(f"no seed below {PER_MUTATION} fails although {name.replace('_', ' ')}")
